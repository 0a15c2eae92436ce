"""What a table of each form holds, worked out from rows and lengths alone."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any


def expected_tables(
    form: str, rows: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], page_size: int, pages: int
) -> dict[str, Any]:
    """The arrays of one table form as lists, by name.

    Args:
        form: "max", "vllm" or "flashinfer".
        rows: the page of each block, a row a request.
        spans: the tokens [start, end) that the forward computes for each request.
        page_size: tokens in a page.
        pages: most pages of one request.
    """
    columns = -(-pages // 8) * 8 + 16
    table = [[*row, *[0] * (columns - len(row))] for row in rows]
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    active = [end - start for start, end in spans]
    if form == "max":
        return {
            "lookup_table": table,
            "cache_lengths": starts,
            "max_prompt_length": max(active),
            "max_cache_length": max(ends),
        }
    if form == "vllm":
        slots = [
            row[position // page_size] * page_size + position % page_size
            for row, span in zip(rows, spans, strict=True)
            for position in range(*span)
        ]
        return {
            "block_table": table,
            "seq_lens": ends,
            "slot_mapping": slots,
            "query_start_loc": offsets(active),
            "max_query_len": max(active),
            "max_seq_len": max(ends),
        }
    read = [row[: -(-end // page_size)] for row, end in zip(rows, ends, strict=True)]
    return {
        "kv_indptr": offsets(map(len, read)),
        "kv_indices": [page for row in read for page in row],
        "kv_last_page_len": [(end - 1) % page_size + 1 for end in ends],
        "qo_indptr": offsets(active),
    }


def offsets(counts: Iterable[int]) -> list[int]:
    """0, then the sums of the first one, two, … counts."""
    return [0, *accumulate(counts)]
