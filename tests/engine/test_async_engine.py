"""AsyncEngine: streams, aborts, and the engine process's death, on the stand-in model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nanoengine import AsyncEngine, EngineConfig, SamplingParams
from nanoengine.errors import ContextLengthError, EngineDeadError, InvalidRequestError, ModelLoadError
from nanoengine.outputs import Delta, MemorySummary

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config(**settings: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": "synthetic", "max_num_seqs": 64, "synthetic": {"step_seconds": 0.002, "max_model_len": 1024}}
        | settings
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config())
    await engine.start()
    yield engine
    await engine.stop()


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt, params)]


async def idle(engine: AsyncEngine, within: float = 1.0) -> None:
    """Wait until the engine holds nothing."""
    deadline = time.monotonic() + within
    while engine.load().blocks_used or engine.load().running or engine.load().waiting:
        assert time.monotonic() < deadline, f"not idle after {within} s: {engine.load()}"
        await asyncio.sleep(0.005)


async def test_a_stream_adds_up_to_the_whole_answer(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=40)
    deltas = await collect(engine, list(b"tell me"), params)
    ids = [token for delta in deltas for token in delta.token_ids]
    assert len(ids) == deltas[-1].completion_tokens == 40
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].prompt_tokens == 7


async def test_scores_of_a_prompt_come_with_the_first_delta(engine: AsyncEngine) -> None:
    prompt = np.frombuffer(b"tell me " * 50, np.uint8).astype(np.int32)
    deltas = await collect(engine, prompt.tolist(), SamplingParams(max_tokens=4, prompt_logprobs=1))
    entries = [entry for scores in deltas[0].prompt_scores for entry in scores.entries(prompt, 1)]
    assert [entry.token_id for entry in entries] == prompt[1:].tolist()
    assert not any(delta.prompt_scores for delta in deltas[1:])
    (only,) = await collect(engine, prompt.tolist(), SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (only.text, only.token_ids, only.finish_reason, only.completion_tokens) == ("", (), "length", 0)
    assert [e for scores in only.prompt_scores for e in scores.entries(prompt, 1)] == entries


async def test_many_streams_at_once_say_what_each_says_alone(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=30)
    prompts = [list(f"prompt number {i} ".encode() * (1 + i % 5)) for i in range(100)]
    together = await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))
    for prompt, deltas in list(zip(prompts, together, strict=True))[::10]:
        alone = await collect(engine, prompt, params)
        assert "".join(d.text for d in deltas) == "".join(d.text for d in alone)
    await idle(engine)


async def test_cached_tokens_are_reported(engine: AsyncEngine) -> None:
    prompt = list(range(32, 112))
    first = await collect(engine, prompt, SamplingParams(max_tokens=2))
    second = await collect(engine, prompt, SamplingParams(max_tokens=2))
    assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, 64)  # whole blocks, and not the last token
    salted = [d async for d in engine.generate(prompt, SamplingParams(max_tokens=2), cache_salt="mine")]
    assert salted[-1].cached_tokens == 0


async def test_a_stop_string_ends_the_answer_and_the_work(engine: AsyncEngine) -> None:
    whole = "".join(d.text for d in await collect(engine, list(b"stop"), SamplingParams(max_tokens=200)))
    stop = whole[20:23]
    deltas = await collect(engine, list(b"stop"), SamplingParams(max_tokens=200, stop=(stop,)))
    assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert deltas[-1].completion_tokens == whole.index(stop) + len(stop)
    await idle(engine)


async def test_leaving_the_loop_frees_the_blocks_within_200_ms(engine: AsyncEngine) -> None:
    stream = engine.generate(list(b"never ending"), SamplingParams(max_tokens=900))
    async for _ in stream:
        break
    assert engine.load().blocks_used > 0
    await stream.aclose()  # type: ignore[attr-defined]
    await idle(engine, within=0.2)


async def test_an_engine_is_heard_of_while_idle_and_not_while_it_stands_still() -> None:
    engine = AsyncEngine(config())
    await engine.start()
    assert engine.pid is not None
    try:
        await asyncio.sleep(0.1)
        heard = engine._heard_at
        async with asyncio.timeout(5):
            while engine._heard_at == heard:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        os.kill(engine.pid, signal.SIGSTOP)
        await asyncio.sleep(0.1)
        heard = engine._heard_at
        await asyncio.sleep(1.5)
        assert engine._heard_at == heard
        assert engine.silent_s > 1.5
    finally:
        os.kill(engine.pid, signal.SIGCONT)
        await engine.stop()


async def test_the_memory_summary_comes_while_idle_and_while_busy(engine: AsyncEngine) -> None:
    assert (await engine.memory_summary()).kv_pool == 0  # a stand-in has none
    busy = asyncio.create_task(collect(engine, list(b"go"), SamplingParams(max_tokens=50)))
    assert await asyncio.gather(*(engine.memory_summary() for _ in range(3)))
    assert (await busy)[-1].finish_reason == "length"


async def test_abort_by_id_ends_the_stream(engine: AsyncEngine) -> None:
    deltas = []
    async for delta in engine.generate(list(b"abort me"), SamplingParams(max_tokens=900), "name"):
        deltas.append(delta)
        await engine.abort("name")
    assert deltas[-1].finish_reason == "abort"
    await engine.abort("unknown")
    await idle(engine)


async def test_cancelling_a_task_aborts_its_request(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, list(b"cancel me"), SamplingParams(max_tokens=900)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(engine, within=0.2)


async def test_a_slow_consumer_gets_large_deltas_and_delays_nobody(engine: AsyncEngine) -> None:
    async def slow() -> list[Delta]:
        deltas = []
        async for delta in engine.generate(list(b"slow"), SamplingParams(max_tokens=200)):
            deltas.append(delta)
            await asyncio.sleep(0.1)
        return deltas

    reader = asyncio.create_task(slow())
    await collect(engine, list(b"fast"), SamplingParams(max_tokens=50))
    assert not reader.done()
    deltas = await reader
    assert len(deltas) < 100
    assert sum(len(d.token_ids) for d in deltas) == 200


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ([], SamplingParams(), InvalidRequestError, "at least one token"),
        ([5, 10**9], SamplingParams(), InvalidRequestError, "outside the model's vocabulary"),
        ([-1], SamplingParams(), InvalidRequestError, "outside the model's vocabulary"),
        ([2**40], SamplingParams(), InvalidRequestError, "32 bits"),
        ([[1], [2]], SamplingParams(), InvalidRequestError, "flat list"),
        ([1.5], SamplingParams(), InvalidRequestError, "integers"),
        ([7] * 1024, SamplingParams(), ContextLengthError, "at most 1023"),
        ([7] * 1000, SamplingParams(max_tokens=100), ContextLengthError, "at most 24 tokens"),
        ([7], SamplingParams(stop_token_ids=(10**6,)), InvalidRequestError, "stop_token_ids: token id"),
    ],
)
async def test_a_bad_request_says_what_to_change_and_the_engine_lives_on(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, error: type[Exception], says: str
) -> None:
    bystander = asyncio.create_task(collect(engine, list(b"bystander"), SamplingParams(max_tokens=20)))
    with pytest.raises(error, match=says):
        await collect(engine, prompt, params)
    assert (await bystander)[-1].finish_reason == "length"


async def test_the_death_of_the_process_is_a_typed_error_at_once() -> None:
    engine = AsyncEngine(config())
    await engine.start()
    streams = [asyncio.create_task(collect(engine, list(b"doomed"), SamplingParams(max_tokens=900))) for _ in range(5)]
    await asyncio.sleep(0.1)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    begin = time.monotonic()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert time.monotonic() - begin < 1
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "signal 9" in str(engine.dead)
    with pytest.raises(EngineDeadError):
        await collect(engine, [1], SamplingParams())
    await engine.stop()


async def test_a_step_that_fails_ends_the_process_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D12: what the device holds then is anybody's guess, so nothing goes on as if nothing had been."""
    (tmp_path / "sitecustomize.py").write_text(
        "from nanoengine.runner.synthetic import SyntheticRunner\n"
        "def launch(self, *given):\n"
        "    raise RuntimeError('the device is lost')\n"
        "SyntheticRunner.launch = launch\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    engine = AsyncEngine(config())
    await engine.start()
    streams = [asyncio.create_task(collect(engine, list(b"doomed"), SamplingParams())) for _ in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 10)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "RuntimeError: the device is lost" in str(engine.dead)
    await engine.stop()


async def test_nobody_waits_for_the_memory_summary_of_a_dead_engine() -> None:
    engine = AsyncEngine(config())
    await engine.start()
    asked = asyncio.create_task(engine.memory_summary())
    await asyncio.sleep(0)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    (answer,) = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), 5)
    assert isinstance(answer, (MemorySummary, EngineDeadError))  # it may have answered before
    with pytest.raises(EngineDeadError):
        await collect(engine, list(b"go"), SamplingParams())
    with pytest.raises(EngineDeadError):
        await engine.memory_summary()
    await engine.stop()


async def test_the_engine_process_does_not_outlive_its_owner() -> None:
    engine = AsyncEngine(config())
    await engine.start()
    assert engine.pid is not None
    assert engine._writer is not None
    engine._writer.transport.abort()  # as if this process had died
    deadline = time.monotonic() + 5
    assert engine._process is not None
    while engine._process.poll() is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert engine._process.returncode == 0
    await engine.stop()


async def test_a_model_that_is_not_there_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        await AsyncEngine(config(model="./no-such-folder")).start()


async def test_settings_that_do_not_fit_the_model_are_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="max_model_len"):
        await AsyncEngine(config(max_model_len=4096)).start()


async def test_two_engines_on_one_host_do_not_meet() -> None:
    engines = [AsyncEngine(config()) for _ in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    answers = await asyncio.gather(*(collect(e, list(b"same"), SamplingParams(max_tokens=10)) for e in engines))
    assert "".join(d.text for d in answers[0]) == "".join(d.text for d in answers[1])
    await asyncio.gather(*(engine.stop() for engine in engines))


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(engine: AsyncEngine) -> None:
    for wrong in ({"priority": 2**70}, {"cache_salt": "\ud800"}):
        with pytest.raises((OverflowError, UnicodeEncodeError)):
            async for _ in engine.generate([1], SamplingParams(max_tokens=1), **wrong):
                pass
    assert not engine._streams
    assert len(await collect(engine, [1], SamplingParams(max_tokens=1))) == 1


async def test_a_message_that_cannot_be_handled_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(config())
    await engine.start()
    try:

        def broken(update: object) -> None:
            raise ValueError("broken")

        monkeypatch.setattr(engine, "_apply", broken)
        with pytest.raises(EngineDeadError, match="broken"):
            await asyncio.wait_for(collect(engine, [1], SamplingParams(max_tokens=5)), 10)
        assert engine.dead is not None
    finally:
        await engine.stop()


async def test_an_open_stream_tells_once_and_is_taken_at_leisure(engine: AsyncEngine) -> None:
    told: list[None] = []
    params = SamplingParams(max_tokens=30)
    stream = engine.open(list(b"tell me"), params, lambda: told.append(None))
    deadline = time.monotonic() + 5
    while engine.load().running or not told:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    assert len(told) == 1, "nothing was taken in between"
    delta = stream.take()
    assert (delta.completion_tokens, delta.finish_reason) == (30, "length")
    assert delta.text == "".join(d.text for d in await collect(engine, list(b"tell me"), params))
    stream.close()
    assert not engine._streams


async def test_the_first_delta_says_how_long_it_waited() -> None:
    engine = AsyncEngine(config(max_num_seqs=1, synthetic={"step_seconds": 0.02, "max_model_len": 1024}))
    await engine.start()
    try:
        first, second = await asyncio.gather(*(collect(engine, [1], SamplingParams(max_tokens=10)) for _ in range(2)))
        assert all(delta.times is None for delta in first[1:] + second[1:])
        assert first[0].times is not None
        assert second[0].times is not None
        assert first[0].times[0] >= 0
        assert first[0].times[0] + 0.2 <= second[0].times[0] + 0.001, "ten steps of the first came before it"
        assert first[0].times[1] >= 0.02
        assert second[0].times[1] > 0, "the stand-in keeps its pace: a step after one that was late is the shorter"
    finally:
        await engine.stop()


async def test_an_open_stream_that_is_closed_is_aborted(engine: AsyncEngine) -> None:
    before = engine.load().finished.get("abort", 0)
    begun = asyncio.Event()
    stream = engine.open(list(b"tell me"), SamplingParams(max_tokens=900), begun.set)
    await begun.wait()
    stream.close()
    stream.close()
    await idle(engine)
    assert engine.load().finished["abort"] == before + 1
