"""LLM: batches of texts, ids and conversations. On the stand-in where any model will do, else on the default one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidRequestError, ModelLoadError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("synthetic", synthetic={"step_seconds": 0, "max_model_len": 256})


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    params = [SamplingParams(max_tokens=1 + i % 7) for i in range(20)]
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in answers] == [p.max_tokens for p in params]
    assert [answer.prompt_token_ids for answer in answers] == [llm.tokenizer.encode(p) for p in prompts]
    assert [answer.text for answer in answers] == [llm.tokenizer.decode(answer.token_ids) for answer in answers]
    llm.engine.check()


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    by_text = llm.generate("hello", params, use_tqdm=False)
    by_ids = llm.generate(llm.tokenizer.encode("hello"), params, use_tqdm=False)
    assert by_text[0].token_ids == by_ids[0].token_ids
    assert len(by_text) == len(by_ids) == 1


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_a_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    whole = llm.generate("stop", SamplingParams(max_tokens=100), use_tqdm=False)[0]
    stop = whole.text[30:33]
    cut = llm.generate("stop", SamplingParams(max_tokens=100, stop=(stop,)), use_tqdm=False)[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert not llm.engine.has_work
    llm.engine.check()


def test_a_stop_token_is_counted_and_named(llm: LLM) -> None:
    whole = llm.generate("token", SamplingParams(max_tokens=50), use_tqdm=False)[0]
    token = whole.token_ids[10]
    cut = llm.generate("token", SamplingParams(max_tokens=50, stop_token_ids=(token,)), use_tqdm=False)[0]
    first = whole.token_ids.index(token)
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (["fine", ""], SamplingParams(max_tokens=4), "at least one token"),
        (["fine", [10**6]], SamplingParams(max_tokens=4), "outside the model's vocabulary"),
        (["fine", "x" * 300], SamplingParams(max_tokens=4), "shorten the prompt"),
        (["fine"], [SamplingParams(max_tokens=4)] * 2, "1 prompts, but 2 sampling parameters"),
    ],
)
def test_one_bad_prompt_refuses_the_batch_before_it_starts(
    llm: LLM, prompts: list[str], params: SamplingParams, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine.has_work


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, 0

    def interrupted():
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_work
    llm.engine.check()


def test_unknown_settings_and_models_are_named() -> None:
    with pytest.raises(ValueError, match="blok_size"):
        LLM("synthetic", blok_size=16)
    with pytest.raises(ModelLoadError, match="nowhere"):
        LLM("./nowhere")


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2))
    assert "3/3" in capsys.readouterr().err


def test_the_default_model_knows_the_capital_of_france(default_gguf: Path) -> None:
    llm = LLM(str(default_gguf))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    twice = llm.chat([question, question], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert [a.text for a in twice] == [answer.text] * 2
