"""Compare autoscalers on a simulated fleet.

    python -m loadtest.autoscale                                          # shapes made here
    python -m loadtest.autoscale --trace AzureLLMInferenceTrace_code.csv --trace 8min_up_and_down_lengths.csv@8
    python -m loadtest.autoscale --only spikes --start 120 --html page.html

"ours" is the production policy with the delays of serve_config.yaml, "plain" the same by queue depth alone, "Serve" is
Ray Serve's default policy with its default delays, for several ``target_ongoing_requests`` (2 is its default).

Replicas are all alike: a first-come-first-served prefill server of 4,000 prompt tokens a second, slowed by one part in
a hundred for each sequence that decodes, 25 ms a token and half a millisecond more for each sequence of the batch. What
has come to a replica stays there. The objective: the first token within 3 s and further ones 50 ms apart, for nine of
ten requests; each ten seconds in which it is missed are lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml
from ray.serve.autoscaling_policy import default_autoscaling_policy
from ray.serve.config import AutoscalingConfig

from deployments.autoscaling.policy import QueueDepthPolicy
from loadtest.autoscale import report
from loadtest.autoscale.scalers import AtOnce, Knative, Oracle, Serve
from loadtest.autoscale.simulator import Fleet, Outcome, Scaler, Setting
from loadtest.autoscale.workload import Workload, shapes, trace
from loadtest.router.report import line

Make = Callable[[Workload, Setting], Scaler]
CONFIG = Path(__file__).parents[2] / "serve_config.yaml"


def ours(setting: Setting, plain: bool = False) -> Scaler:
    """The production policy as serve_config.yaml has it, between the setting's bounds."""
    application = yaml.safe_load(CONFIG.read_text())["applications"][0]
    data = next(one["autoscaling_config"] for one in application["deployments"] if "autoscaling_config" in one)
    config = AutoscalingConfig(**(data | {"min_replicas": setting.smallest, "max_replicas": setting.largest}))
    kwargs = config.policy.policy_kwargs
    return Serve(
        QueueDepthPolicy(target_queue_depth=kwargs["target_queue_depth"]) if plain else QueueDepthPolicy(**kwargs),
        config,
    )


def serve(setting: Setting, target: float) -> Scaler:
    """Serve's default policy."""
    config = AutoscalingConfig(
        min_replicas=setting.smallest, max_replicas=setting.largest, target_ongoing_requests=target
    )
    return Serve(default_autoscaling_policy, config)


SCALERS: dict[str, Make] = {
    "ours": lambda workload, setting: ours(setting),
    "ours, plain": lambda workload, setting: ours(setting, plain=True),
    **{f"Serve, target {n}": partial(lambda n, workload, setting: serve(setting, n), n) for n in (2, 4, 8, 16)},
    "Knative-like, target 11": lambda workload, setting: Knative(11.0),  # 70 % of 16
    "all at once": lambda workload, setting: AtOnce(),
    "oracle": Oracle,
}


def simulate(workload: Workload, setting: Setting, name: str) -> Outcome:
    """One scaler, by the name that it has in the table."""
    return Fleet(workload.fresh(), setting, SCALERS[name]).run()


def workloads(given: list[str]) -> list[Workload]:
    """The traces named on the command line, each ``FILE`` or ``FILE@LOAD``; without any, the shapes."""
    made = []
    for text in given:
        name, _, load = text.partition("@")
        if Path(name).exists():
            made.append(trace(Path(name), int(load or 1)))
        else:
            print(f"skipped: there is no {name}", file=sys.stderr)
    return made if given else shapes()


def main() -> None:
    """Print a table for each workload; write all of them, with plots, as one HTML page."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.autoscale", description=main.__doc__)
    parser.add_argument(
        "--trace", action="append", default=[], metavar="FILE[@LOAD]", help="may be given several times"
    )
    parser.add_argument("--only", default="", help="workloads with this in their names")
    parser.add_argument("--scalers", default="", help="names, separated by semicolons; all by default")
    parser.add_argument("--start", type=float, default=Setting.start_s, help="seconds from order to ready")
    parser.add_argument("--smallest", type=int, default=Setting.smallest)
    parser.add_argument("--largest", type=int, default=Setting.largest)
    parser.add_argument("--html", type=Path, default=None, help="where to write the page")
    args = parser.parse_args()
    names = tuple(args.scalers.split(";")) if args.scalers else tuple(SCALERS)
    if strangers := set(names) - set(SCALERS):
        parser.error(f"no such scaler: {', '.join(strangers)}; there are {'; '.join(SCALERS)}")
    setting = Setting(start_s=args.start, smallest=args.smallest, largest=args.largest)

    sections = []
    for workload in workloads(args.trace):
        if args.only not in workload.name:
            continue
        print(f"\n{workload.name}, {len(workload.requests)} requests\n{line(report.HEADS)}", flush=True)
        rows = []
        for name in names:
            rows.append((name, simulate(workload, setting, name)))
            print(line(report.cells(rows[-1])), flush=True)
        sections.append((workload.name, workload.seconds, rows))
    if args.html is not None:
        report.write_html(args.html, sections)
        print(f"\n{args.html}")


if __name__ == "__main__":
    main()
