"""The Kubernetes manifests, checked with no cluster.

What an API server checks is checked against KubeRay's own CRDs where they are at hand. What only the operator or Ray
would say, after the manifest was accepted, is checked here: KubeRay 1.7's validation and the faults that people meet.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"

spec = importlib.util.spec_from_file_location("k8s_serve_config", ROOT / "k8s" / "serve_config.py")
serve_config = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve_config)

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def build(folder: str) -> str:
    """What `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, so overlays cannot be built")
    done = subprocess.run(
        ["kubectl", "kustomize", folder], cwd=ROOT / "k8s", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["base/rayservice.yaml as it is", "base", "overlays/gpu"])
def service(request: pytest.FixtureRequest) -> Manifest:
    """The RayService: the plain file, which needs no tool, and what kustomize makes of each folder."""
    plain = request.param.endswith("as it is")
    text = (ROOT / "k8s/base/rayservice.yaml").read_text() if plain else build(request.param)
    (found,) = [document for document in documents(text) if document["kind"] == "RayService"]
    return found


def groups(service: Manifest) -> list[Manifest]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def ray_container(group: Manifest) -> Manifest:
    """KubeRay takes container 0 for Ray's."""
    return group["template"]["spec"]["containers"][0]


def variables(group: Manifest) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in ray_container(group)["env"]}


def quantity(text: str) -> float:
    """A Kubernetes quantity in cores or bytes."""
    number, unit = re.fullmatch(r"([\d.]+)(m|[KMGT]i)?", str(text)).groups()
    return float(number) * {None: 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


# --- one truth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", serve_config.manifests(), ids=lambda path: str(path.relative_to(ROOT)))
def test_manifest_carries_serve_config_yaml(manifest: Path) -> None:
    patches = serve_config.manifests()[manifest]
    assert manifest.read_text() == serve_config.rendered(manifest, patches), "run `python k8s/serve_config.py`"


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{path}.{key}").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for item in value for k, v in leaves(item, f"{path}[{item['name']}]").items()}
    return {path: value}


def test_base_differs_from_serve_config_yaml_only_where_a_cluster_must() -> None:
    service = yaml.safe_load((ROOT / "k8s/base/rayservice.yaml").read_text())
    there = leaves(yaml.safe_load(service["spec"]["serveConfigV2"]))
    here = leaves(yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    assert {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)} <= {
        ".proxy_location",
        ".http_options.host",
        ".logging_config.encoding",
        ".applications[llm].args.engine.num_threads",
        ".applications[llm].deployments[EngineReplica].max_replicas_per_node",
    }
    assert there[".http_options.host"] == "0.0.0.0"
    assert there[".proxy_location"] == "EveryNode", (
        "with HeadOnly no worker is ever ready, and the head takes no traffic"
    )


def test_patch_that_names_no_deployment_is_refused() -> None:
    base = {"deployments": [{"name": "A", "n": 1}]}
    assert serve_config.merge(base, {"deployments": [{"name": "A", "m": 2}]}) == {
        "deployments": [{"name": "A", "n": 1, "m": 2}]
    }
    with pytest.raises(ValueError, match="does not have: B"):
        serve_config.merge(base, {"deployments": [{"name": "B"}]})


def test_serve_config_passes_the_strict_check(service: Manifest, tmp_path: Path) -> None:
    """KubeRay and Ray accept unknown keys in it; `deployments.check` does not."""
    path = tmp_path / "serve_config.yaml"
    path.write_text(service["spec"]["serveConfigV2"])
    command = [sys.executable, "-m", "deployments.check", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- what an API server checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_custom_resources_fit_kuberays_crds(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("cel", reason="common-expression-language is not installed")
    if not (SHARED / "crds").is_dir():
        pytest.skip("KubeRay's CRDs are not beside the repository (../shared/crds)")
    path = tmp_path / "built.yaml"
    path.write_text(build(folder))
    command = [sys.executable, str(SHARED / "tools/crdval.py"), str(SHARED / "crds"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 custom resources, 0 bad" in done.stdout


KNOWN = {
    "": "apiVersion kind metadata spec",
    "spec": "serveConfigV2 rayClusterConfig upgradeStrategy rayClusterDeletionDelaySeconds excludeHeadPodFromServeSvc "
    "serveService suspend managedBy",  # the two deprecated thresholds do nothing: writing them is a mistake
    "spec.upgradeStrategy": "type clusterUpgradeOptions",
    "spec.rayClusterConfig": "rayVersion authOptions enableInTreeAutoscaling autoscalerOptions headGroupSpec "
    "workerGroupSpecs gcsFaultToleranceOptions headServiceAnnotations suspend managedBy",
    "spec.rayClusterConfig.authOptions": "mode secretName",
    "spec.rayClusterConfig.autoscalerOptions": "version idleTimeoutSeconds upscalingMode resources env envFrom "
    "securityContext volumeMounts imagePullPolicy image",
    "spec.rayClusterConfig.headGroupSpec": "template headService enableIngress resources labels rayStartParams "
    "serviceType",
    "spec.rayClusterConfig.workerGroupSpecs": "groupName replicas minReplicas maxReplicas idleTimeoutSeconds resources "
    "labels rayStartParams template numOfHosts",
    "pod": "containers initContainers volumes securityContext serviceAccountName automountServiceAccountToken "
    "terminationGracePeriodSeconds topologySpreadConstraints affinity nodeSelector tolerations priorityClassName "
    "imagePullSecrets runtimeClassName",
    "container": "name image imagePullPolicy command args env envFrom ports resources volumeMounts securityContext "
    "readinessProbe livenessProbe startupProbe lifecycle",
    "probe": "exec httpGet initialDelaySeconds periodSeconds timeoutSeconds failureThreshold successThreshold",
}


def test_no_unknown_keys(service: Manifest) -> None:
    def check(kind: str, value: Manifest) -> None:
        assert value.keys() <= set(KNOWN[kind].split()), f"unknown key in {kind or 'the manifest'}"

    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    check("", service)
    check("spec", spec)
    check("spec.upgradeStrategy", spec["upgradeStrategy"])
    check("spec.rayClusterConfig", cluster)
    check("spec.rayClusterConfig.authOptions", cluster["authOptions"])
    check("spec.rayClusterConfig.autoscalerOptions", cluster["autoscalerOptions"])
    check("spec.rayClusterConfig.headGroupSpec", cluster["headGroupSpec"])
    for worker in cluster["workerGroupSpecs"]:
        check("spec.rayClusterConfig.workerGroupSpecs", worker)
    for group in groups(service):
        assert group["template"].keys() <= {"metadata", "spec"}
        check("pod", group["template"]["spec"])
        for container in group["template"]["spec"]["containers"]:
            check("container", container)
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                check("probe", container.get(probe, {}))


# --- what the operator checks, after the manifest was accepted -------------------------------------------------------


def test_operators_rules(service: Manifest) -> None:
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    name = service["metadata"]["name"]
    assert len(name) <= 47
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert spec["upgradeStrategy"]["type"] in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["authOptions"]["mode"] == "token"
    for group in groups(service):
        assert "restartPolicy" not in group["template"]["spec"], "the autoscaler wants it unset or Never"
        assert not (group.get("resources") and group["rayStartParams"].keys() & {"num-cpus", "num-gpus", "memory"})
        assert "RAY_enable_autoscaler_v2" not in variables(group)
    names = [worker["groupName"] for worker in cluster["workerGroupSpecs"]]
    assert len(set(names)) == len(names)
    for worker in cluster["workerGroupSpecs"]:
        assert 0 <= worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]


def test_ray_version_is_the_pinned_one(service: Manifest) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned


def test_same_image_everywhere(service: Manifest) -> None:
    """Ray refuses workers of another version, and the controller imports our policy."""
    assert len({ray_container(group)["image"] for group in groups(service)}) == 1


def test_environment_is_the_same_on_head_and_workers(service: Manifest) -> None:
    """Serve reads its switches in every process: HAProxy on one side only serves nothing."""
    head, *workers = ({k: v for k, v in variables(group).items() if k.startswith("RAY_")} for group in groups(service))
    assert head["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert all(worker == head for worker in workers)


def test_tokens_take_the_same_way_as_with_make_serve(service: Manifest) -> None:
    made = dict(re.findall(r"^serve: export (RAY_SERVE_\w+) \?= (\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    image = dict(re.findall(r"\b(RAY_SERVE_\w+)=(\d+)", (ROOT / "k8s/Dockerfile").read_text()))
    assert made.items() >= image.items()
    assert made.keys() - image.keys() == {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"}, "a matter of each cluster's grace"
    assert {k: v for k, v in variables(groups(service)[0]).items() if k.startswith("RAY_SERVE_")} == made


# --- traffic ---------------------------------------------------------------------------------------------------------


def test_serve_port(service: Manifest) -> None:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for group in groups(service):
        ports = {port["name"]: port["containerPort"] for port in ray_container(group)["ports"]}
        assert ports["serve"] == config["http_options"]["port"], "KubeRay makes no Service without it"
        assert ports["metrics"] == 8080


def test_head_runs_nothing_and_takes_no_traffic(service: Manifest) -> None:
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    start = service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert start == {"num-cpus": "0", "dashboard-host": "0.0.0.0"}


def test_worker_readiness_asks_raylet_and_proxy(service: Manifest) -> None:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for worker in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        probe = ray_container(worker)["readinessProbe"]
        *_, script = probe["exec"]["command"]
        assert "localhost:52365/api/local_raylet_healthz | grep success" in script
        assert f"localhost:{config['http_options']['port']}/-/healthz | grep success" in script
        waits = [int(wait) for wait in re.findall(r"-T (\d+)", script)]
        assert len(waits) == 2
        assert sum(waits) <= probe["timeoutSeconds"], "both checks may use their whole time"
        assert "livenessProbe" not in ray_container(worker), "the operator's own fits its Ray version"


def test_open_streams_outlive_a_stop(service: Manifest) -> None:
    """A replica's grace <= the node's drain < the pod's grace, and the old cluster is kept as long."""
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    longest = max(
        deployment["graceful_shutdown_timeout_s"]
        for application in config["applications"]
        for deployment in application["deployments"]
    )
    for worker in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        drain = float(variables(worker)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert longest <= drain < worker["template"]["spec"]["terminationGracePeriodSeconds"]
        assert float(variables(worker)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= longest
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest


# --- room ------------------------------------------------------------------------------------------------------------


def test_largest_scale_fits_the_worker_groups(service: Manifest) -> None:
    """At max_replicas all replicas find a place: else Serve waits for ever, and says "insufficient resources"."""
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = ray_container(worker)["resources"]["limits"]
    need: dict[str, float] = {"num_cpus": 0, "num_gpus": 0}
    for deployment in application["deployments"]:
        count = deployment.get("num_replicas") or deployment["autoscaling_config"]["max_replicas"]
        for resource in need:
            need[resource] += count * deployment["ray_actor_options"].get(resource, 0)
        if "max_replicas_per_node" in deployment:
            assert count <= worker["maxReplicas"] * deployment["max_replicas_per_node"]
    assert need["num_cpus"] <= worker["maxReplicas"] * quantity(limits["cpu"])
    assert need["num_gpus"] <= worker["maxReplicas"] * quantity(limits.get("nvidia.com/gpu", 0))
    smallest = sum(
        (deployment.get("num_replicas") or deployment["autoscaling_config"]["min_replicas"])
        * deployment["ray_actor_options"]["num_cpus"]
        for deployment in application["deployments"]
    )
    assert smallest <= worker["minReplicas"] * quantity(limits["cpu"]), "the service starts without the autoscaler"


def test_threads_of_an_engine_are_its_pods_cores(service: Manifest) -> None:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    threads = config["applications"][0]["args"]["engine"]["num_threads"]
    assert threads <= quantity(ray_container(worker)["resources"]["limits"]["cpu"])


def test_memory_is_reserved_as_it_is_limited(service: Manifest) -> None:
    """Ray sizes its object store by the limit: memory that is only promised gets pods killed."""
    for group in groups(service):
        resources = ray_container(group)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert quantity(resources["limits"]["memory"]) >= quantity("6Gi")
        assert "ephemeral-storage" in resources["requests"]


# --- security and surroundings ---------------------------------------------------------------------------------------


def test_pods_meet_the_restricted_standard(service: Manifest) -> None:
    for group in groups(service):
        pod = group["template"]["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        container = ray_container(group)["securityContext"]
        assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    autoscaler = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert autoscaler["securityContext"] == container
    for worker in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert worker["template"]["spec"]["automountServiceAccountToken"] is False


def test_written_folders_are_volumes(service: Manifest) -> None:
    """Not root: the image's caches lie on a volume, and every mount has one."""
    folders = set(re.findall(r"\w+=(/cache\S*)", (ROOT / "k8s/Dockerfile").read_text()))
    assert len(folders) == 4
    for group in groups(service):
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in ray_container(group)["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        assert all(folder.startswith("/cache") for folder in folders)
        assert mounts["/cache"] == "cache"


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
def test_selectors_find_our_pods(kind: str) -> None:
    texts = [(ROOT / "k8s/base" / f"{kind.lower()}.yaml").read_text(), (ROOT / "k8s/base/rayservice.yaml").read_text()]
    found = [document for text in texts for document in documents(text)]
    (service,) = [document for document in found if document["kind"] == "RayService"]
    labels = [group["template"]["metadata"]["labels"] for group in groups(service)]
    for document in found:
        if document["kind"] != kind:
            continue
        selector = document["spec"].get("selector") or document["spec"]["podSelector"]
        wanted = selector["matchLabels"].items()
        assert any(wanted <= pod.items() for pod in labels), document["metadata"]["name"]


def test_rays_own_ports_are_closed_to_strangers() -> None:
    (policy,) = documents((ROOT / "k8s/base/networkpolicy.yaml").read_text())
    for rule in policy["spec"]["ingress"]:
        if "from" not in rule:
            assert rule["ports"] == [{"port": 8000}]
        elif "ports" not in rule:
            assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_image_has_what_kuberay_calls_and_no_root() -> None:
    text = (ROOT / "k8s/Dockerfile").read_text()
    assert re.search(r"apt-get install .*\bbash wget\b", text)
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    assert text.index("USER 1000") < text.index('CMD ["serve"')
    assert "--constraint constraints.txt" in text
    assert not re.search(r"^(ARG|ENV).*(TOKEN|SECRET|PASSWORD|KEY)", text, re.MULTILINE | re.IGNORECASE)
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    ignored = (ROOT / "k8s/Dockerfile.dockerignore").read_text().split()
    assert copied == {name[1:] for name in ignored if name.startswith("!")}, "what is copied is what is sent"
    assert all((ROOT / name).exists() for name in copied - {"README.md"})
