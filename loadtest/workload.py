"""What is asked: prompts of mixed length, with or without a beginning that many share."""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force
""".split()  # noqa: SIM905 - a paragraph reads better than a hundred quoted words


@dataclass(frozen=True, slots=True)
class Workload:
    """A seeded source of chat requests. Lengths are words, each close to one token for common tokenizers.

    Each request takes one of ``prompt_words`` and one of ``max_tokens`` at random. With ``shared_words``, its system
    message is one of ``groups`` long texts, so that prefix caching and routing have something to find.
    """

    model: str
    prompt_words: tuple[int, ...]
    max_tokens: tuple[int, ...]
    shared_words: int = 0
    groups: int = 1

    def request(self, rng: random.Random) -> dict[str, object]:
        """The JSON body of one streaming chat request."""
        messages = [{"role": "user", "content": text(rng, rng.choice(self.prompt_words))}]
        if self.shared_words:
            group = random.Random(rng.randrange(self.groups))
            messages.insert(0, {"role": "system", "content": text(group, self.shared_words)})
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": rng.choice(self.max_tokens),
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def text(rng: random.Random, words: int) -> str:
    """So many words, at random."""
    return " ".join(rng.choices(_WORDS, k=words))
