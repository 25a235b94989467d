"""Beam search: the algorithm against transformers', and the API's answers against the algorithm on the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from deployments.ingress.beam import Ask, Rules, likeliest, search
from tests.engine import structured_cases
from tests.engine.structured_cases import write_tiny_llm
from tests.serve.live import Server
from tests.serve.test_api import envelope
from tests.serve.tiny_engine import TinyEngines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structured_cases, "PADDING", 0)  # transformers would sample it
        yield write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(TinyEngines(folder), max_choices=12)
    try:
        yield server
    finally:
        server.stop()


def asking(model: Any, prompt: list[int], count: int) -> Ask:
    async def ask(tokens: list[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt + tokens])).logits[0, -1].log_softmax(-1)
        values, ids = logprobs.topk(count)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    return ask


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(
    ("width", "early_stopping"), [(1, False), (2, False), (4, False), (2, True), (4, True), (2, "never"), (4, "never")]
)
async def test_beams_are_those_of_transformers(
    model: Any, width: int, length_penalty: float, early_stopping: Any
) -> None:
    ends = list(range(40, 80))  # so many that answers of several lengths compete
    for seed in range(4):
        prompt = torch.randint(3, 250, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        ask = asking(model, prompt, width + len(ends))
        found = await search(ask, width, 10, frozenset(ends), Rules(length_penalty, early_stopping))
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        if width == 1:
            expected = expected[:1]
        answers = [answer[len(prompt) :].tolist() for answer in expected]
        for beam, answer in zip(found, answers, strict=True):
            assert answer[: len(beam.tokens)] == beam.tokens
            assert set(answer[len(beam.tokens) :]) <= {0, ends[0]}, "padding, of either kind"


async def test_the_answers_of_the_api(server: Server, model: Any) -> None:
    tokenizer = server.engines.tokenizer
    prompts = ["Once upon", "The"]
    body = {"model": "m", "prompt": prompts, "n": 3, "max_tokens": 8, "use_beam_search": True}
    body |= {"temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    made = 0
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        ask = asking(model, ids, likeliest(3, tokenizer.eos_token_ids))
        expected = await search(ask, 3, 8, tokenizer.eos_token_ids, Rules())
        choices = answer["choices"][3 * number : 3 * number + 3]
        assert [c["index"] for c in choices] == [3 * number + i for i in range(3)]
        for choice, beam in zip(choices, expected, strict=True):
            tokens = beam.tokens[:-1] if beam.finish_reason == "stop" else beam.tokens
            assert choice["text"] == tokenizer.decode(tokens)
            assert choice["finish_reason"] == beam.finish_reason
            assert choice["token_ids"] == beam.tokens
            made += len(beam.tokens)
    assert answer["usage"]["completion_tokens"] == made
    server.alive()


def test_chat_too(server: Server) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "max_tokens": 4,
        "use_beam_search": True,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 2}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"length_penalty": 99}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_what_cannot_be_combined_is_refused(server: Server, more: dict[str, Any], param: str) -> None:
    body = {"model": "m", "prompt": "A", "max_tokens": 4, "use_beam_search": True, **more}
    assert envelope(httpx.post(f"{server.url}/v1/completions", json=body), 400)["param"] == param
    server.alive()
