"""The example server's tokens are those of a model without a cache, whatever the cache does meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import serve
from pagekeeper.tables import StateTables, VllmTables
from serving.engine import Engine, Request, Stats
from serving.mamba import Mamba
from serving.model import DTYPE, LayerPages, Model, ModelConfig
from serving.report import Comparison, Run
from serving.workload import ByteTokenizer, Chat, tokenizer_for
from serving_options import options

EXAMPLE = Path(serve.__file__)
CONFIG = ModelConfig(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=1024,
)
MODEL = Model.seeded(CONFIG, seed=5)
STATES = Model.seeded(replace(CONFIG, num_layers=4, mamba=Mamba(2, 8, 4, conv_kernel=3)), seed=5)
HYBRID = Model.seeded(replace(CONFIG, num_layers=4, sliding_window=24), seed=5)
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class WordTokenizer:
    """A token or a few for each word, so that a chat is a hundred or a few hundred tokens long."""

    tokens_per_word: int

    def encode(self, text: str) -> list[int]:
        parts = product(text.split(), range(self.tokens_per_word))
        return [zlib.crc32(f"{word}{part}".encode()) % CONFIG.vocab_size for word, part in parts]


def chat(given: Namespace) -> Chat:
    return Chat(
        WordTokenizer(given.tokens_per_word),
        conversations=given.conversations,
        turns=given.turns,
        max_new_tokens=given.max_new_tokens,
        seed=given.seed,
    )


def greedy_without_a_cache(model: Model, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """The oracle: everything is computed anew for each token, one request at a time, on one large page."""
    config, tokens = model.config, list(prompt)
    for _ in range(max_new_tokens):
        length = len(tokens)
        tables = VllmTables(
            block_table=np.array([[0]], dtype=np.int32),
            seq_lens=np.array([length], dtype=np.int32),
            slot_mapping=np.arange(length),
            query_start_loc=np.array([0, length], dtype=np.int32),
            max_query_len=length,
            max_seq_len=length,
        )
        states = StateTables(np.zeros(1, np.int32), tables.query_start_loc, length)
        pages: list[LayerPages] = [
            torch.empty((1, 2, length, config.num_kv_heads, config.head_dim), dtype=DTYPE)
            for _ in range(config.num_layers)
        ]
        if config.mamba is not None:
            for layer in config.groups["mamba"]:
                kept = config.mamba.states(DTYPE)
                pages[layer] = [torch.zeros((1, *state.shape), dtype=DTYPE) for state in kept]
        of_layers = [tables if isinstance(page, torch.Tensor) else states for page in pages]
        hidden = model.forward(torch.tensor(tokens), torch.arange(length), of_layers, pages)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if tokens[-1] in config.eos_token_ids:
            break
    return tokens[len(prompt) :]


@cache
def expected_outputs(tokens_per_word: int = 1, model: Model = MODEL) -> list[list[int]]:
    """What the answers of the chat are, conversation by conversation."""
    given = options(tokens_per_word=tokens_per_word)
    talk, outputs = chat(given), []
    for request in talk.openings():
        following: Request | None = request
        while following:
            answer = greedy_without_a_cache(model, tuple(following.prompt), given.max_new_tokens)
            following.tokens += answer
            outputs.append(answer)
            following = talk.follow_up(following)
    return outputs


def run(given: Namespace, *, reuse: bool, model: Model = MODEL) -> Run:
    """Serves the chat and leaves an idle, sound cache."""
    kv = serve.make_cache(model.config, given, reuse=reuse)
    result = serve.serve(model, kv, chat(given), given)
    kv.verify()
    assert kv.block_count().used == 0
    return result


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("chunk", [5, 64, 4096])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_tokens_are_equal_with_and_without_reuse(page_size: int, chunk: int, overlap: bool) -> None:
    given = options(page_size=page_size, pages=3200 // page_size, max_num_input_tokens=chunk, overlap=overlap)
    for reuse in (False, True):
        result = run(given, reuse=reuse)
        assert result.outputs == expected_outputs()
        assert (result.stats.reused_tokens > 0) == reuse


# Pools that hold the longest request and little more.
TINY = {
    1: {"page_size": 1, "pages": 200},
    16: {"page_size": 16, "pages": 14},
    128: {"page_size": 128, "pages": 4, "tokens_per_word": 2},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_tokens_are_equal_when_pages_are_evicted_and_requests_preempted(
    page_size: int, overlap: bool
) -> None:
    given = options(**TINY[page_size], overlap=overlap)
    without = run(given, reuse=False)
    reuse = run(given, reuse=True)
    assert without.outputs == reuse.outputs == expected_outputs(given.tokens_per_word)
    assert reuse.stats.preemptions > 0
    assert reuse.stats.evictions > 0
    assert reuse.stats.reused_tokens > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, 5), (16, 4096)])
def test_a_hybrids_tokens_are_equal_with_and_without_reuse(page_size: int, chunk: int, overlap: bool) -> None:
    given = options(
        page_size=page_size,
        pages=3200 // page_size,
        sliding_pages=960 // page_size,
        max_num_input_tokens=chunk,
        overlap=overlap,
    )
    for reuse in (False, True):
        result = run(given, reuse=reuse, model=HYBRID)
        assert result.outputs == expected_outputs(model=HYBRID)
        assert (result.stats.reused_tokens > 0) == reuse


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("page_size", "sliding_pages"), [(1, 110), (16, 7)])
def test_a_hybrids_tokens_are_equal_when_pages_are_evicted_and_requests_preempted(
    page_size: int, sliding_pages: int, overlap: bool
) -> None:
    given = options(**TINY[page_size], sliding_pages=sliding_pages, overlap=overlap)
    reuse = run(given, reuse=True, model=HYBRID)
    assert reuse.outputs == expected_outputs(model=HYBRID)
    assert reuse.stats.preemptions > 0
    assert reuse.stats.evictions > 0
    assert reuse.stats.reused_tokens > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, 5), (16, 4096)])
def test_tokens_of_a_model_with_states_are_equal_with_and_without_reuse(
    page_size: int, chunk: int, overlap: bool
) -> None:
    given = options(page_size=page_size, pages=3200 // page_size, max_num_input_tokens=chunk, overlap=overlap)
    for reuse in (False, True):
        result = run(given, reuse=reuse, model=STATES)
        assert result.outputs == expected_outputs(model=STATES)
        assert (result.stats.reused_tokens > 0) == reuse


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("page_size", "state_pages"), [(1, 12), (16, 6)])
def test_tokens_of_a_model_with_states_are_equal_when_pages_are_evicted_and_requests_preempted(
    page_size: int, state_pages: int, overlap: bool
) -> None:
    given = options(**TINY[page_size], state_pages=state_pages, overlap=overlap)
    reuse = run(given, reuse=True, model=STATES)
    assert reuse.outputs == expected_outputs(model=STATES)
    assert reuse.stats.preemptions > 0
    assert reuse.stats.evictions > 0
    assert reuse.stats.reused_tokens > 0


def test_each_turn_goes_on_from_the_newest_state_that_was_kept() -> None:
    # One at a time: a turn's prompt begins with that of the turn before it.
    result = run(options(max_batch=1, state_pages=200), reuse=True, model=STATES)
    before = {(request.conversation, request.turn + 1): request for request in result.requests}
    for request in result.requests:
        known = before.get((request.conversation, request.turn))
        if known is not None:
            # At the last page boundary of that prompt, or at a multiple of 64 tokens in the answer behind it.
            kept = {(len(known.prompt) - 1) // 16 * 16, (len(known.tokens) - 1) // 64 * 64}
            assert request.context.cached_prefix_length == max(kept)


def test_answers_depend_on_the_states_that_pages_hold() -> None:
    given = options(turns=2, max_batch=4)
    kv = serve.make_cache(STATES.config, given, reuse=True)
    talk = chat(given)
    engine = Engine(STATES, kv, max_batch_size=4, max_num_input_tokens=64)
    for request in talk.openings():
        engine.submit(request)
    first = [request for _ in iter(lambda: engine.busy, False) for request in engine.step()]
    kv.get_buffers(0, name="ssm", group="mamba").zero_()
    for request in [asked for asked in map(talk.follow_up, first) if asked is not None]:
        engine.submit(request)
        while engine.busy:
            engine.step()
        assert request.context.cached_prefix_length > 0
        assert request.output != expected_outputs(model=STATES)[3 * request.conversation + 1]


def test_a_hybrids_window_changes_what_it_says() -> None:
    whole = Model.seeded(replace(HYBRID.config, sliding_window=None), seed=5)
    assert expected_outputs(model=whole) != expected_outputs(model=HYBRID)


def test_layers_with_a_sliding_window_hold_the_pages_of_the_window_and_of_what_is_computed() -> None:
    given = options(max_batch=1, max_num_input_tokens=16)
    result = run(given, reuse=True, model=HYBRID)
    longest = max(len(request.tokens) for request in result.requests) - 1  # the last one has no KV
    # A chunk and the 23 tokens before it: 39 tokens from any on lie in at most 4 blocks of 16.
    assert longest > 5 * 16
    assert result.stats.peak_pages["full"] == -(-longest // 16)
    assert result.stats.peak_pages["sliding"] == 4


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
def test_a_preempted_request_computes_its_own_answer_again_in_pieces(reuse: bool, overlap: bool) -> None:
    # Each request grows to 15 tokens with KV; both together outgrow 20 pages of one token.
    kv = serve.make_cache(CONFIG, options(page_size=1, pages=20), reuse=reuse)
    engine = Engine(MODEL, kv, max_batch_size=2, max_num_input_tokens=3, overlap=overlap)
    requests = [Request([first, 8, 3, 6], max_new_tokens=12) for first in (1, 2)]
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
    assert engine.stats.preemptions > 0
    for request in requests:
        assert request.output == greedy_without_a_cache(MODEL, tuple(request.prompt), 12)


def test_the_books_are_clean_after_every_step() -> None:
    for overlap, page_size in product((False, True), (1, 16)):
        given = options(**TINY[page_size], overlap=overlap, turns=1)
        kv = serve.make_cache(CONFIG, given, reuse=True)
        engine = Engine(MODEL, kv, max_batch_size=3, max_num_input_tokens=64, overlap=overlap)
        for request in chat(given).openings():
            engine.submit(request)
        while engine.busy:
            engine.step()
            kv.verify()


def test_reused_tokens_are_all_that_were_computed_before() -> None:
    given = options(max_batch=1)
    result = run(given, reuse=True)
    # One at a time, in the order of arrival: first turns, then second turns. The last token has no KV.
    computed: list[list[int]] = []
    hits = 0
    for request in sorted(result.requests, key=lambda request: (request.turn, request.conversation)):
        prompt = request.prompt[:-1]  # whose last token is always computed
        hits += max((common(prompt, tokens) for tokens in computed), default=0)
        computed.append(request.tokens[:-1])
    assert result.stats.reused_tokens == hits
    assert result.stats.prefilled_tokens == result.stats.prompt_tokens - hits


def common(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_answers_depend_on_what_reused_pages_hold() -> None:
    given = options(turns=2, max_batch=4)
    kv = serve.make_cache(CONFIG, given, reuse=True)
    talk = chat(given)
    engine = Engine(MODEL, kv, max_batch_size=4, max_num_input_tokens=64)
    for request in talk.openings():
        engine.submit(request)
    first = [request for _ in iter(lambda: engine.busy, False) for request in engine.step()]
    kv.pages_view().zero_()
    second = [talk.follow_up(request) for request in first]
    asked = [request for request in second if request is not None]
    assert len(asked) == len(second)
    for request in asked:
        engine.submit(request)
    while engine.busy:
        engine.step()
    for request in asked:
        assert request.output != expected_outputs()[3 * request.conversation + 1]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_an_end_token_ends_an_answer_and_what_is_under_way_for_it_is_dropped(overlap: bool) -> None:
    end = expected_outputs()[0][3]
    model = Model.seeded(replace(CONFIG, eos_token_ids=frozenset({end})), seed=5)
    given = options(turns=1, overlap=overlap)
    result = run(given, reuse=True, model=model)
    assert result.outputs[0] == expected_outputs()[0][:4]
    for request in result.requests:
        assert request.output == greedy_without_a_cache(model, tuple(request.prompt), given.max_new_tokens)


def test_a_request_that_can_never_fit_is_rejected_and_the_others_are_served() -> None:
    given = options(pages=8, conversations=1, turns=1)
    kv = serve.make_cache(CONFIG, given, reuse=True)
    engine = Engine(MODEL, kv, max_batch_size=2, max_num_input_tokens=64)
    long, short = Request([1] * 200, max_new_tokens=3), Request([2] * 20, max_new_tokens=3)
    engine.submit(long)
    engine.submit(short)
    ended = [request for _ in iter(lambda: engine.busy, False) for request in engine.step()]
    assert {request.prompt[0] for request in ended} == {1, 2}
    assert long.rejected
    assert long.output == []
    assert short.output == greedy_without_a_cache(MODEL, tuple(short.prompt), 3)
    assert kv.block_count().used == 0


def test_a_request_that_outgrows_the_pool_alone_is_rejected() -> None:
    kv = serve.make_cache(CONFIG, options(pages=2), reuse=True)
    engine = Engine(MODEL, kv, max_batch_size=2, max_num_input_tokens=64)
    request = Request([3] * 30, max_new_tokens=10)
    engine.submit(request)
    while engine.busy:
        engine.step()
    assert request.rejected
    assert kv.block_count().used == 0


def test_a_request_longer_than_the_model_is_rejected() -> None:
    kv = serve.make_cache(CONFIG, options(), reuse=True)
    engine = Engine(MODEL, kv, max_batch_size=2, max_num_input_tokens=64)
    request = Request([3] * 1020, max_new_tokens=10)
    engine.submit(request)
    assert engine.step() == [request]
    assert request.rejected == "1030 tokens are more than the model's 1024 positions"


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_token_budget_below_the_batch_size_still_serves_everyone(overlap: bool) -> None:
    given = options(max_batch=3, max_num_input_tokens=2, overlap=overlap, turns=1)
    assert run(given, reuse=True).outputs == expected_outputs()[::3]


def test_overlapped_steps_are_planned_before_the_tokens_before_them_are_known() -> None:
    known: dict[bool, list[int]] = {}
    for overlap in (False, True):
        kv = serve.make_cache(CONFIG, options(), reuse=True)
        engine = Engine(MODEL, kv, max_batch_size=1, max_num_input_tokens=64, overlap=overlap)
        request = Request([5] * 10, max_new_tokens=3)
        engine.submit(request)
        known[overlap] = []
        while engine.busy:
            engine.step()
            known[overlap].append(len(request.output))
    assert known == {False: [1, 2, 3], True: [0, 1, 2, 3]}


def test_counts_are_those_of_the_cache() -> None:
    given = options(**TINY[16], overlap=True)
    kv = serve.make_cache(CONFIG, given, reuse=True)
    stats, metrics = serve.serve(MODEL, kv, chat(given), given).stats, kv.metrics()
    assert stats.preemptions == metrics["preemptions"]
    assert stats.requests == metrics["claims"] == metrics["releases"]
    assert stats.reused_tokens == metrics["reused_tokens"] + metrics["late_reused_tokens"]
    assert stats.evictions == metrics["evictions"]


def test_a_directorys_own_tokenizer_is_used(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "book": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_for(tmp_path, 512).encode("a new book") == [0, 2, 1]


def test_a_directory_without_a_tokenizer_is_served_by_bytes(tmp_path: Path) -> None:
    assert tokenizer_for(tmp_path, 300) == ByteTokenizer(300)


def test_bytes_are_folded_into_a_small_vocabulary() -> None:
    assert ByteTokenizer(512).encode("aé") == [0x61, 0xC3, 0xA9]
    assert ByteTokenizer(100).encode("a") == [97]
    assert ByteTokenizer(90).encode("a") == [7]


def comparison(*outputs: list[int]) -> Comparison:
    """Runs without and with reuse that answered one request with these tokens."""
    runs = []
    for tokens in outputs:
        request = Request([1, 2], max_new_tokens=3)
        request.tokens += tokens
        runs.append(Run([request], Stats(requests=1, generated_tokens=len(tokens))))
    return Comparison("a chat", {"full": 8}, *runs)


def test_the_verdict_names_the_first_token_that_differs() -> None:
    found = comparison([5, 6, 7], [5, 6, 8])
    assert not found.equal
    assert found.verdict() == "TOKENS DIFFER: conversation 1, turn 1, from generated token 3 on."


def test_no_tokens_at_all_are_not_called_equal() -> None:
    assert not comparison([], []).equal


def test_the_program_prints_json_and_succeeds_when_tokens_are_equal() -> None:
    arguments = ["--json", "--conversations", "1", "--turns", "2", "--max-new-tokens", "3", "--overlap"]
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["equal"] is True
    assert [request["turn"] for request in found["requests"]] == [0, 1]
    assert {len(request["output"]) for request in found["requests"]} == {3}
    saved = found["without_reuse"]["prefilled_tokens"] - found["with_reuse"]["prefilled_tokens"]
    assert saved == found["with_reuse"]["reused_tokens"] > 0


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_the_table_shows_what_was_saved(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.table", None)
    serve.compare(MODEL, options(turns=1)).show()
    shown = capsys.readouterr().out
    for text in (
        "prompt tokens",
        "reused tokens",
        "prefill computed",
        "hit rate",
        "time",
        "pages",
        "preemptions",
    ):
        assert text in shown
    assert "All 28 generated tokens are equal with and without reuse." in shown


def test_the_program_fails_when_every_request_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--pages", "1", "--conversations", "1"]) == 1
    assert "NO TOKENS WERE GENERATED." in capsys.readouterr().out


def test_the_table_of_a_hybrid_shows_the_pages_of_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    serve.compare(HYBRID, options(turns=1)).show()
    shown = capsys.readouterr().out
    assert "full, peak of 200" in shown
    assert "sliding, peak of 40" in shown
    assert "sliding window 24" in shown
    assert "All 28 generated tokens are equal with and without reuse." in shown


def test_the_table_of_a_model_with_states_shows_how_many_there_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve.compare(STATES, options(turns=1)).show()
    shown = capsys.readouterr().out
    assert "mamba, peak of 60" in shown
    assert "states kept every" in shown
    assert "All 28 generated tokens are equal with and without reuse." in shown


def test_states_and_windows_are_for_the_small_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments in (["--sliding-window", "64"], ["--mamba"]):
        with pytest.raises(SystemExit):
            serve.main(["--model", str(tmp_path), *arguments])
        assert f"{arguments[0]}: not allowed with argument --model" in capsys.readouterr().err


def test_a_directory_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model", str(tmp_path)]) == 2
    assert f"{tmp_path / 'config.json'}: cannot be read" in capsys.readouterr().err


def test_a_count_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--page-size", "0"])
    assert "argument --page-size: 0: must be a whole number of at least 1" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serve.main(["--help"])
    assert stop.value.code == 0
    assert "example: python examples/serve.py" in capsys.readouterr().out
