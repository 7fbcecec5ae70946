"""A step as arrays: every query meets every key that it sees once, tables follow their owners."""

from __future__ import annotations

import numpy as np

from ridgeline.backends.cuda.step.batch import Cut, Kind, Tables, arrange, cut_items
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, SeqId, Work


def sampling() -> Sampling:
    return Sampling(SamplingParams(), 0, ())


def item(
    seq_id: SeqId, table: tuple[int, ...], how: Sampling, start: int = 0, count: int = 1
) -> Work:
    return Work(seq_id, start, tuple(range(count)), table, (), how, (), ())


def test_work_lists_cover_each_query_and_key_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        spans, at = [], 0
        for _ in range(random.integers(1, 6)):
            count = int(random.integers(1, 40)) if random.random() < 0.5 else 1
            spans.append((at, count, int(random.integers(0, 500))))
            at += count
        window = int(random.choice([0, 0, 33, 100]))
        most_slots = int(random.choice([0, 4, 4096]))
        cut = Cut(16, 64, most_slots)
        items, folds = cut_items(spans, list(range(len(spans))), Kind(0, 2, window), cut)
        owner = {int(slot) + i: int(token) for token, slot, times in folds for i in range(times)}
        assert len(owner) <= most_slots
        assert sorted(owner) == sorted(slot for slot in items[:, 5].tolist() if slot >= 0)
        met: dict[int, list[int]] = {}
        for row, token, queries, position, split, slot in items.tolist():
            assert queries <= 8
            for i in range(queries):
                first = max(0, position + i - window + 1) if window else 0
                assert slot >= 0 or first // 64 >= split
                keys = range(first, position + i + 1)
                if slot >= 0:
                    assert owner[slot] == token
                    keys = range(max(first, split * 64), min(position + 1, split * 64 + 64))
                met.setdefault(token + i, []).extend(keys)
                assert spans[row][0] <= token + i < spans[row][0] + spans[row][1]
        for at, count, start in spans:
            for i in range(count):
                first = max(0, start + i - window + 1) if window else 0
                assert sorted(met[at + i]) == list(range(first, start + i + 1))


def test_tokens_know_their_positions_and_tables() -> None:
    tables, how = Tables(1, 4, 8), sampling()
    work = [
        item((0, 0), (1, 2), how, 17, 3),
        item((1, 0), (3,), how, 4),
        item((2, 0), (4,), how, 0, 2),
    ]
    batch = arrange(work, tables, {Kind(0, 1, 0): Cut(16, 64)})
    assert batch.tokens.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.positions.tolist() == [17, 18, 19, 4, 0, 1]
    assert batch.table_rows.tolist() == [batch.row_of[i] for i in (0, 0, 0, 1, 2, 2)]
    assert batch.spans == [(0, 3, 17), (3, 1, 4), (4, 2, 0)]
    singles = arrange([item((1, 0), (3,), how, 5), item((0, 0), (1, 2), how, 20)], tables, {})
    assert singles.positions.tolist() == [5, 20]
    assert singles.row_of == [batch.row_of[1], batch.row_of[0]]


def test_tables_are_written_where_they_change() -> None:
    tables, how = Tables(2, 3, 8), sampling()
    one, two = (1, 2), (3, 4, 5)

    def rows(*work: Work) -> tuple[list[int], int]:
        found = tables.rows_of([w._replace(others=(w.table,)) for w in work])
        return found, len(tables.take_changes())

    assert rows(item((0, 0), one, how), item((1, 0), two, how)) == ([0, 1], 2 * 5)
    assert rows(item((1, 0), two, how), item((0, 0), one, how)) == ([1, 0], 0)
    longer = (3, 4, 5, 6)
    assert rows(item((1, 0), longer, how)) == ([1], 2)  # its end alone, in both groups
    assert tables.array[:, 1, :4].tolist() == [[3, 4, 5, 6]] * 2
    left_behind = (-1, 4, 5, 6)
    assert rows(item((1, 0), left_behind, how)) == ([1], 2 * 4)
    found, _ = rows(item((1, 0), two, how), item((2, 0), (7,), how), item((3, 0), (6,), how))
    assert sorted(found) == [0, 1, 2]
    for row, table in zip(found, (two, (7,), (6,)), strict=True):
        assert tables.array[0, row, : len(table)].tolist() == list(table)


def test_a_row_that_goes_to_another_sequence_is_new_to_it() -> None:
    tables, first, second = Tables(1, 1, 4), sampling(), sampling()
    tables.rows_of([item((0, 0), (1,), first)])
    assert tables.fresh == [(0, 0)]
    tables.rows_of([item((0, 0), (1,), first)])
    assert tables.fresh == []
    tables.rows_of([item((1, 0), (1,), second)])
    assert tables.fresh == [(0, 0)]
    tables.rows_of([item((0, 0), (1,), first)])
    assert tables.fresh == [(0, 0)]
