"""The sampler against a naive reference, against chance, and against itself in other company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.sampling import filters
from nanoengine.sampling.params import SamplingParams
from nanoengine.sampling.random import request_seed, uniform
from nanoengine.sampling.sampler import Sampled, Sampler
from nanoengine.scheduling.step import Admission

EOS = (3, 5)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def make_sampler(vocab: int = 50, slots: int = 8, seed: int = 0) -> Sampler:
    return Sampler(slots, vocab, EOS, DEVICE, seed)


def admit(sampler: Sampler, slot: int, key: int = 0, prompt=(1, 2), output=(), **params) -> None:
    sampler.admit(Admission(slot, key, SamplingParams(**params), ids(*prompt), ids(*output)))


def sample(sampler: Sampler, logits, slots, positions) -> Sampled:
    return sampler(torch.as_tensor(logits), ids(*slots), ids(*positions))


def tokens_of(sampler: Sampler, logits, slots, positions) -> list[int]:
    return sample(sampler, logits, slots, positions).tokens.tolist()


# -- the reference: one row, plain numpy, nothing clever ---------------------------------------------------------


def reference_logits(logits, prompt, output, params: SamplingParams) -> np.ndarray:
    x = np.array(logits, dtype=np.float64)
    if len(output) < params.min_tokens:
        for token in (*EOS, *params.stop_token_ids):
            x[token] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return x


def reference_probabilities(logits, prompt, output, params: SamplingParams) -> np.ndarray:
    x = reference_logits(logits, prompt, output, params)
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    order = np.argsort(-p)
    if params.top_p < 1:
        needed = np.searchsorted(np.cumsum(p[order]), params.top_p * p.sum()) + 1
        p[p < p[order[needed - 1]]] = 0
    return p / p.sum()


def engine_probabilities(sampler: Sampler, logits, slot: int, position: int) -> np.ndarray:
    """The distribution that the sampler draws from, taken from it just before the draw."""
    rows = sampler._table[[slot]]
    adjusted = sampler._adjust(torch.as_tensor(logits)[None], ids(slot), rows, ids(position))
    captured = []

    def spy(weights, u):
        captured.append(weights.clone())
        return original(weights, u)

    original, filters.draw = filters.draw, spy
    try:
        sampler._choose(adjusted, rows, ids(position))
    finally:
        filters.draw = original
    weights = captured[0][0, : len(logits)].double().numpy()
    return weights / weights.sum()


# Logits on a grid that the penalties do not leave, and no round top_p: "smaller than" has one answer in any precision.
grid_logits = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=6, max_size=40)
settings_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 3, 7, 1000]),
        "top_p": st.sampled_from([1.0, 0.9503, 0.7003, 0.3107, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.011, 0.13, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 2.0, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, -0.5]),
        "min_tokens": st.sampled_from([0, 2]),
    }
)


@given(grid_logits, settings_strategy, st.data())
@settings(max_examples=300, deadline=None)
def test_distribution_equals_the_reference(logits, params, data):
    token = st.integers(0, len(logits) - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=5))
    output = data.draw(st.lists(token, max_size=5))
    sampler = make_sampler(len(logits))
    admit(sampler, 1, prompt=prompt, output=output, **params)
    got = engine_probabilities(sampler, np.float32(logits), 1, len(prompt) + len(output))
    want = reference_probabilities(logits, prompt, output, SamplingParams(**params))
    assert ((got > 0) == (want > 0)).all()
    np.testing.assert_allclose(got, want, rtol=1e-4)


@given(grid_logits, settings_strategy, st.data())
@settings(max_examples=200, deadline=None)
def test_greedy_is_argmax_of_penalised_logits_whatever_the_filters(logits, params, data):
    token = st.integers(0, len(logits) - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=5))
    output = data.draw(st.lists(token, max_size=5))
    params = params | {"temperature": 0.0}
    sampler = make_sampler(len(logits))
    admit(sampler, 0, prompt=prompt, output=output, **params)
    got = tokens_of(sampler, [logits], [0], [len(prompt) + len(output)])[0]
    assert got == reference_logits(logits, prompt, output, SamplingParams(**params)).argmax()


def test_greedy_ties_go_to_the_lowest_id_and_top_tokens_are_exact():
    sampler = make_sampler(4)
    admit(sampler, 0, temperature=0.0)
    assert tokens_of(sampler, [[1.0, 2.0, 2.0, 0.0]], [0], [2]) == [1]


def test_top_k_and_top_p_keep_ties_of_the_last_token_kept():
    weights = torch.tensor([[4.0, 2.0, 2.0, 1.0] + [0.0] * 60])
    filters.keep_top_k(weights, torch.tensor([2]), 2)
    assert weights[0, :4].tolist() == [4, 2, 2, 0]
    weights = torch.tensor([[4.0, 2.0, 2.0, 1.0] + [0.0] * 60])
    filters.keep_top_p(weights, torch.tensor([0.5], dtype=torch.float64))
    assert weights[0, :4].tolist() == [4, 2, 2, 0]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-9])
def test_top_p_by_probe_and_by_full_sort_agree(top_p, monkeypatch):
    torch.manual_seed(0)
    weights = torch.rand(5, 64 * 20) ** torch.tensor([[0.1], [1], [8], [30], [200]])  # flat to sharp
    results = []
    for probe, sort_above in ((1, 512), (16, 512), (300, 200), (300, 10_000), (10_000, 10_000)):
        monkeypatch.setattr(filters, "_PROBE", probe)
        monkeypatch.setattr(filters, "_SORT_ABOVE", sort_above)
        kept = weights.clone()
        filters.keep_top_p(kept, torch.full((5,), top_p, dtype=torch.float64))
        results.append(kept)
    assert all(torch.equal(results[0], other) for other in results)
    assert (results[0].double().sum(1) >= top_p * weights.double().sum(1) * (1 - 1e-12)).all()


@pytest.mark.parametrize("top_k", [1, 5, 511, 512, 513, 1000])
def test_top_k_by_topk_and_by_sort(top_k):
    torch.manual_seed(0)
    weights = torch.rand(3, 64 * 20)
    kept = weights.clone()
    filters.keep_top_k(kept, torch.tensor([top_k, 1, top_k]), top_k)
    assert (kept > 0).sum(1).tolist() == [top_k, 1, top_k]
    assert kept.amax(1).tolist() == weights.amax(1).tolist()


# -- the draw ---------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.1, 0.5, 1.0]), min_size=1, max_size=300),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_draw_inverts_the_cdf_and_never_takes_a_zero(weights, u):
    padded = torch.zeros(1, -(-len(weights) // 64) * 64)
    padded[0, : len(weights)] = torch.tensor(weights)
    token, drawn = filters.draw(padded, torch.tensor([u], dtype=torch.float64))
    assert drawn.item() == (max(weights) > 0)
    if drawn:
        assert padded[0, token] > 0
        cdf = padded[0].double().cumsum(0)
        target = u * cdf[-1]
        assert cdf[token] > target - 1e-12
        assert token == 0 or cdf[token - 1] <= target + 1e-12


def test_draw_at_the_last_representable_u():
    weights = torch.zeros(1, 128)
    weights[0, [0, 70]] = 1.0
    for u in (1 - 2**-53, np.nextafter(1.0, 0)):
        assert filters.draw(weights, torch.tensor([u], dtype=torch.float64))[0].item() == 70
    assert filters.draw(weights, torch.tensor([0.5], dtype=torch.float64))[0].item() == 70
    assert filters.draw(weights, torch.tensor([0.0], dtype=torch.float64))[0].item() == 0


def test_draw_is_safe_where_sums_differ_by_rounding():
    """A block's float32 sum and its float64 cumulated sum differ in their last digits; the end of a block is a zero."""
    weights = torch.rand(200, 192, generator=torch.Generator().manual_seed(0))
    weights.view(200, 3, 64)[:, :, 50:] = 0
    ends = weights.view(200, 3, 64).sum(2).double().cumsum(1) / weights.view(200, 3, 64).sum(2).double().sum(1)[:, None]
    for u in (torch.full((200,), 1 - 2**-53, dtype=torch.float64), *(torch.nextafter(e, e * 0) for e in ends.T[:2])):
        tokens, _ = filters.draw(weights, u)
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    used = expected > 0
    assert counts[~used].sum() == 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["position", "seed", "key"])
def test_samples_follow_the_distribution(params, by):
    """20,000 draws along each axis on which random numbers must be independent."""
    draws, vocab = 20_000, 200
    logits = np.float32(np.random.default_rng(1).normal(0, 2, vocab))
    sampler = make_sampler(vocab, slots=draws if by != "position" else 1)
    output = [4, 4, 9]
    expected = draws * reference_probabilities(logits, [1, 2], output, SamplingParams(**params))
    if by == "position":
        admit(sampler, 0, output=output, seed=7, **params)
        slots, positions = np.zeros(draws, np.int32), np.arange(5, 5 + draws, dtype=np.int32)
        sampler._penalties.record = lambda *_: None  # every draw from the same state
    else:
        for i in range(draws):
            admit(sampler, i, key=i, output=output, seed=i if by == "seed" else None, **params)
        slots, positions = np.arange(draws, dtype=np.int32), np.full(draws, 5, np.int32)
    rows = torch.as_tensor(logits).expand(draws, vocab)
    counts = np.bincount(sampler(rows, slots, positions).tokens.numpy(), minlength=vocab)
    frequent = expected >= 5  # the statistic's rule of thumb; the rest counts as one class
    counts = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    assert chi_square(counts, expected) < 4.5


def test_uniform_is_uniform_and_uncorrelated_over_neighbouring_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    u = uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert chi_square(counts, np.full(100, u.size / 100)) < 4
    for left, right in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / math.sqrt(left.size)


def test_random_numbers_are_a_fixed_function():
    """The figures may not change: a seed that a user wrote down must give the same tokens with the next version."""
    got = uniform(np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 100_000]))
    assert got.tolist() == [0.6524484863740322, 0.7743991716672016, 0.12423738179155697]
    assert request_seed(-1, 0, 0) == 2**64 - 1
    assert request_seed(None, 0, 1) != request_seed(None, 0, 2) != request_seed(None, 1, 2)


# -- the same request alone, in company, and after a preemption -----

MIX = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0},
    {"temperature": 0.8, "seed": 11},
    {"top_k": 5, "seed": 12},
    {"top_k": 300, "seed": 13},
    {"top_p": 0.6, "seed": 14},
    {"top_p": 0.999, "temperature": 3.0, "seed": 15},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.7, "seed": 16},
    {"min_p": 0.05, "seed": 17},
    {"frequency_penalty": 0.8, "presence_penalty": 0.3, "seed": 18, "min_tokens": 6},
    {"min_tokens": 10, "stop_token_ids": (7, 8, 9), "temperature": 5.0, "seed": 19},
    {"logprobs": 3, "temperature": 1.3, "seed": 20},
    {"logprobs": 0, "temperature": 0.0, "min_tokens": 3},
]
VOCAB = 1000  # no multiple of a block


def model_logits(history: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for a model: logits that depend on the whole sequence."""
    seed = hash(tuple(history)) % 2**32
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB)).to(dtype)


def generate(sampler: Sampler, slot: int, history: list[int], steps: int, dtype: torch.dtype) -> list[int]:
    for _ in range(steps):
        history = [*history, *tokens_of(sampler, model_logits(history, dtype)[None], [slot], [len(history)])]
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_row_alone_equals_the_mixed_batch(dtype):
    steps, prompt = 12, [1, 2, 6, 7]
    alone = []
    for key, params in enumerate(MIX):
        sampler = make_sampler(VOCAB)
        admit(sampler, 3, key=key, prompt=prompt, **params)
        alone.append(generate(sampler, 3, prompt, steps, dtype))

    rng = np.random.default_rng(0)
    sampler = make_sampler(VOCAB, slots=len(MIX))
    slot_of = rng.permutation(len(MIX))
    for key, params in enumerate(MIX):
        admit(sampler, slot_of[key], key=key, prompt=prompt, **params)
    histories = [list(prompt) for _ in MIX]
    while any(len(h) < len(prompt) + steps for h in histories):
        batch = [k for k in rng.permutation(len(MIX)) if len(histories[k]) < len(prompt) + steps and rng.random() < 0.7]
        if not batch:
            continue
        logits = torch.stack([model_logits(histories[k], dtype) for k in batch])
        before = logits.clone()
        got = tokens_of(sampler, logits, [slot_of[k] for k in batch], [len(histories[k]) for k in batch])
        assert torch.equal(logits, before)  # the caller's logits are read only
        for k, token in zip(batch, got, strict=True):
            histories[k].append(token)
    assert histories == alone


@pytest.mark.parametrize("params", MIX, ids=str)
@pytest.mark.parametrize("after", [1, 5, 11])
def test_readmission_in_another_slot_continues_the_same_tokens(params, after):
    prompt, steps, dtype = [1, 2, 6], 12, torch.float32
    sampler = make_sampler(VOCAB)
    admit(sampler, 0, key=5, prompt=prompt, **params)
    whole = generate(sampler, 0, prompt, steps, dtype)
    admit(sampler, 2, key=5, prompt=prompt, **params)
    first = generate(sampler, 2, prompt, after, dtype)
    admit(sampler, 2, key=6, prompt=[9], frequency_penalty=1.0)  # someone else takes the slot and leaves counts there
    generate(sampler, 2, [9], 4, dtype)
    for slot in (4, 2):
        admit(sampler, slot, key=5, prompt=prompt, output=first[len(prompt) :], **params)
        assert generate(sampler, slot, first, steps - after, dtype) == whole


def test_seeds():
    def run(engine_seed: int, key: int, **params) -> list[int]:
        sampler = make_sampler(VOCAB, seed=engine_seed)
        admit(sampler, 0, key=key, prompt=[1], **params)
        logits = model_logits([0], torch.float32).expand(16, VOCAB)
        return tokens_of(sampler, logits, [0] * 16, range(1, 17))

    assert run(0, 1, seed=4) == run(9, 2, seed=4)
    assert run(0, 1, seed=4) != run(0, 1, seed=5)
    assert run(0, 1) == run(0, 1)
    assert run(0, 1) != run(0, 2)
    assert run(0, 1) != run(1, 1)
    assert run(0, 1, seed=-1) == run(0, 1, seed=2**64 - 1)  # modulo 2**64


# -- penalties and stopping ---------------------------------------------------------


def scripted(sampler: Sampler, steps: int, prompt: list[int]) -> list[int]:
    logits = torch.full((1, 50), -10.0)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    history = list(prompt)
    for _ in range(steps):
        history += tokens_of(sampler, logits, [0], [len(history)])
    return history[len(prompt) :]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 2.0}, [7, 8]),  # the prompt's three 7s do not count
        ({"repetition_penalty": 2.0}, [8]),  # here they do
        ({"frequency_penalty": 0.4}, [7, 7, 7, 8]),
        ({}, [7, 7, 7, 7]),
    ],
    ids=str,
)
def test_penalties_count_what_they_should(params, expected):
    sampler = make_sampler()
    admit(sampler, 0, prompt=[7, 7, 7], temperature=0.0, **params)
    assert scripted(sampler, len(expected), [7, 7, 7]) == expected


def test_more_slots_with_penalties_than_the_first_allocation():
    sampler = make_sampler(slots=40)
    for slot in range(40):
        admit(sampler, slot, prompt=[slot], temperature=0.0, repetition_penalty=100.0)
    logits = torch.ones(40, 50)
    logits[torch.arange(40), torch.arange(40)] = 5.0  # each row's favourite is its prompt's token
    got = tokens_of(sampler, logits, range(40), [1] * 40)
    assert got == [1 if slot == 0 else 0 for slot in range(40)]


def test_a_prompt_of_the_whole_vocabulary_can_be_penalised():
    sampler = make_sampler()
    admit(sampler, 0, prompt=list(range(50)) * 3, output=[49] * 1000, repetition_penalty=1.5, frequency_penalty=2.0)
    assert tokens_of(sampler, torch.zeros(1, 50), [0], [1150])[0] in range(49)


def test_min_tokens_masks_every_end_until_then():
    sampler = make_sampler()
    logits = torch.zeros(1, 50)
    logits[0, [3, 5, 9]] = torch.tensor([10.0, 9.0, 8.0])
    admit(sampler, 0, temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    assert tokens_of(sampler, logits.repeat(4, 1), [0] * 4, [2, 3, 4, 5]) == [0, 0, 3, 3]
    admit(sampler, 0, temperature=0.0, min_tokens=2, output=[1, 1], stop_token_ids=(9,))  # preempted at two
    assert tokens_of(sampler, logits, [0], [4]) == [3]
    admit(sampler, 0, temperature=0.0)  # the slot's next user has no such wish
    assert tokens_of(sampler, logits, [0], [2]) == [3]


def test_the_last_token_of_the_vocabulary_is_neither_masked_nor_lost():
    sampler = Sampler(1, 50, (), DEVICE, 0)
    admit(sampler, 0, temperature=0.0, min_tokens=5)
    logits = torch.zeros(1, 50)
    logits[0, 49] = 1.0
    assert tokens_of(sampler, logits, [0], [2]) == [49]
    admit(sampler, 0, temperature=0.001)
    assert tokens_of(sampler, logits, [0], [2]) == [49]


# -- extremes ---------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-6},
        {"temperature": 5e-324},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-16},
        {"top_k": 10**9},
        {"top_k": 1},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 100.0, "frequency_penalty": -2.0, "temperature": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_extreme_values_give_valid_tokens(params, dtype, scale):
    logits = (torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    sampler = make_sampler(VOCAB)
    admit(sampler, 0, prompt=[1, 2], output=[4, 5], **params)
    got = sampler(logits, np.zeros(64, np.int32), np.arange(4, 68, dtype=np.int32)).tokens
    assert ((got >= 0) & (got < VOCAB)).all()
    sharp = params.get("temperature", 1) <= 1e-6 or params.get("top_p") == 1e-9 or params.get("top_k") == 1
    if (sharp or params.get("min_p") == 1.0) and "repetition_penalty" not in params and scale > 1e-3:
        values = logits.gather(1, got[:, None])[:, 0]
        assert torch.equal(values, logits.amax(1))


@pytest.mark.parametrize("params", [p for p in MIX if "logprobs" not in p], ids=str)
def test_rows_that_cannot_be_sampled_end_their_request_and_no_other(params):
    good = model_logits([1], torch.float32)
    nan, some_nan, inf, nothing = good.clone(), good.clone(), good.clone(), torch.full_like(good, -torch.inf)
    nan[:] = torch.nan
    some_nan[77] = torch.nan
    inf[77] = torch.inf
    sampler = make_sampler(VOCAB)
    for slot in range(6):
        admit(sampler, slot, key=1, prompt=[1], **params)
    got = tokens_of(sampler, torch.stack([good, nan, some_nan, inf, nothing, good]), range(6), [1] * 6)
    assert got[1:5] == [EOS[0]] * 4
    sampler = make_sampler(VOCAB)
    admit(sampler, 0, key=1, prompt=[1], **params)
    assert got[0] == got[5] == tokens_of(sampler, good[None], [0], [1])[0]


def test_one_finite_logit_is_always_taken():
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 0] = logits[1, 500] = logits[2, VOCAB - 1] = -5.0
    sampler = make_sampler(VOCAB)
    for slot, params in enumerate(({"top_p": 0.5}, {"top_k": 300}, {"temperature": 100.0})):
        admit(sampler, slot, **params)
    assert tokens_of(sampler, logits, range(3), [2] * 3) == [0, 500, VOCAB - 1]


# -- log-probabilities ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_of_the_raw_distribution(dtype):
    sampler = make_sampler(VOCAB)
    admit(sampler, 0, temperature=0.3, top_k=3, repetition_penalty=5.0, logprobs=4, seed=1)
    admit(sampler, 1, temperature=0.0)
    admit(sampler, 2, temperature=0.0, logprobs=0)
    logits = torch.stack([model_logits([i], dtype) for i in range(3)])
    sampled = sample(sampler, logits, [0, 1, 2], [2, 2, 2])
    want = logits.float().log_softmax(-1)
    assert sampled.logprobs is not None
    chosen, top_ids, top_logprobs = sampled.logprobs
    assert top_ids.shape == top_logprobs.shape == (3, 4)
    assert chosen.dtype == torch.float32
    for row in (0, 2):
        assert chosen[row].item() == pytest.approx(want[row, sampled.tokens[row]].item(), abs=1e-6)
    torch.testing.assert_close(top_logprobs[0], want[0].topk(4).values)
    torch.testing.assert_close(want[0, top_ids[0]], top_logprobs[0])
    assert sample(sampler, logits[:1], [1], [2]).logprobs is None


def test_logprobs_are_always_finite():
    sampler = make_sampler()
    admit(sampler, 0, logprobs=5)
    admit(sampler, 1, logprobs=20)
    logits = torch.full((2, 50), -torch.inf)
    logits[0, 3] = 0.0
    sampled = sample(sampler, logits, [0, 1], [2, 2])
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.tolist() == [0.0, -9999.0]
    assert sampled.logprobs.top_logprobs.isfinite().all()
