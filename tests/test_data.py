"""Data: prepared folders are whole or refused, reading is exact, the order knows no batch size."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from golden.synthetic import SyntheticDataset, synthetic_tokens
from pithdata import prepare
from pithdata.sources import documents
from pithtrain.data import IGNORED_LABEL, Dataset, Samples, bigram_entropy, validation_batches
from pithtrain.data.index import check_shards, read_index
from pithtrain.data.order import sample_indices

END = 256
PINNED_ORDER = [1, 3, 9, 7, 6, 8, 5, 4, 3, 2, 0, 1]
PINNED_TOKENS = [[6, 18, 30, 42, 92, 66], [25, 74, 31, 34, 37, 40]]
TEXTS = {"b.txt": "second file", "a.txt": "first", "aa/c.txt": "día\r\nthird", "skip.md": "other suffix"}


def write_files(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), END]


def stored_tokens(dataset: Dataset) -> list[int]:
    return dataset.token_range(0, dataset.num_tokens).tolist()


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", TEXTS)


@pytest.fixture
def counting(tmp_path: Path) -> Dataset:
    """1,000 tokens over shards of 64, in which token i is (i * 7) % 251 so that a shift by one is seen."""
    text = bytes((i * 7) % 251 % 128 for i in range(999))
    write_files(tmp_path / "counting", {"a.txt": text})
    prepare([tmp_path / "counting"], tmp_path / "counted", shard_tokens=64)
    return Dataset(tmp_path / "counted" / "train", seed=3)


# Preparing


def test_tokens_are_the_files_in_name_order_each_with_its_end(source: Path, tmp_path: Path) -> None:
    info = prepare([source], tmp_path / "out")
    dataset = Dataset(tmp_path / "out" / "train")
    expected = [token for name in ("a.txt", "aa/c.txt", "b.txt") for token in tokens_of(TEXTS[name])]
    assert stored_tokens(dataset) == expected
    assert info.created and info.validation is None and not (tmp_path / "out" / "validation").exists()
    assert (info.train.num_documents, info.train.num_tokens, info.train.vocab_size) == (3, len(expected), 257)
    assert (info.train.tokenizer, info.train.dtype, info.train.end_of_document) == ("bytes", "uint16", END)
    check_shards(dataset.folder, dataset.index, content=True)


def test_json_lines_are_documents_and_a_named_file_needs_no_suffix(tmp_path: Path) -> None:
    lines = '{"text": "one"}\n\n{"id": 7, "text": ""}\r\n{"text": "d\\u00eda \\ud83d\\ude00"}'
    write_files(tmp_path, {"data.jsonl": lines, "notes.rst": "plain"})
    info = prepare([tmp_path / "notes.rst", tmp_path / "data.jsonl"], tmp_path / "out")
    expected = tokens_of("plain") + tokens_of("one") + tokens_of("día 😀")
    assert stored_tokens(Dataset(tmp_path / "out" / "train")) == expected
    assert (info.train.num_documents, info.train.num_empty, info.train.num_invalid) == (3, 1, 0)


def test_every_json_line_has_a_key_of_its_own(tmp_path: Path) -> None:
    texts = [f"{'x' * (i % 9)}{i}" for i in range(40)]
    files = [(tmp_path / name, name) for name in ("a.jsonl", "b.jsonl")]
    for path, _ in files:
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    read = list(documents(files, "error"))
    assert [document.text for document in read] == texts * 2
    assert len({document.key for document in read}) == 80


PREPARE = """
import sys
from pathlib import Path
from pithdata import prepare
prepare([Path(sys.argv[1])], Path(sys.argv[2]), sys.argv[3], holdout=0.3, shard_tokens=2**12)
"""


def test_threads_and_batches_do_not_change_a_byte(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, str | bytes] = {f"{i:02}.txt": "one three two " * (500 * i) for i in range(20)}
    texts["z.jsonl"] = "".join(json.dumps({"text": "two " * i}) + "\n" for i in range(200))
    source = write_files(tmp_path / "source", texts)
    for threads in ("1", "3"):
        command = [sys.executable, "-c", PREPARE, source, tmp_path / threads, words]
        subprocess.run(command, check=True, env={**os.environ, "RAYON_NUM_THREADS": threads})
    monkeypatch.setattr("pithdata.writer.BATCH_CHARACTERS", 1000)
    prepare([source], tmp_path / "small", str(words), holdout=0.3, shard_tokens=2**12)
    one = folder_bytes(tmp_path / "1")
    assert len(one) > 50 and one == folder_bytes(tmp_path / "3") == folder_bytes(tmp_path / "small")


def test_holding_out_goes_by_name_and_covers_every_document_once(tmp_path: Path) -> None:
    names = [f"{i:03}.txt" for i in range(300)]
    source = write_files(tmp_path / "source", {name: name for name in names})
    write_files(tmp_path / "moved" / "source", dict.fromkeys(names, "other text"))
    held = []
    for place in (source, tmp_path / "moved" / "source"):
        out = tmp_path / f"out-{place.parent.name}"
        info = prepare([place], out, holdout=0.2)
        assert info.validation is not None
        assert info.train.num_documents + info.validation.num_documents == 300
        assert 35 <= info.validation.num_documents <= 85
        held.append(info.validation.num_documents)
    assert held[0] == held[1]
    splits = [stored_tokens(Dataset(tmp_path / f"out-{tmp_path.name}" / s)) for s in ("train", "validation")]
    stored = [name for tokens in splits for name in bytes(t % END for t in tokens).decode().split("\0") if name]
    assert sorted(stored) == names


def test_a_shard_boundary_is_not_seen(source: Path, tmp_path: Path) -> None:
    stored = []
    for size in (1, 2, 5, 1000):
        prepare([source], tmp_path / f"out{size}", shard_tokens=size)
        dataset = Dataset(tmp_path / f"out{size}" / "train")
        assert len(dataset.index.shards) == math.ceil(dataset.num_tokens / size)
        stored.append(dataset.read(np.arange(dataset.num_samples(3)), 3).tolist())
    assert stored[0] == stored[1] == stored[2] == stored[3]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A word tokenizer whose ids leave a gap, with the end of a document as a special token."""
    vocab = {"<unk>": 0, "one": 1, "two": 2, "three": 70_000}
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizers_file_gives_its_own_ids_and_end(words: Path, tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {"a.txt": "one three two one", "b.txt": "two <|endoftext|>"})
    info = prepare([source], tmp_path / "out", str(words))
    end = tokenizers.Tokenizer.from_file(str(words)).token_to_id("<|endoftext|>")
    stored = stored_tokens(Dataset(tmp_path / "out" / "train"))
    assert stored[:5] == [1, 70_000, 2, 1, end]  # not cut to the 2 tokens that the file asks for
    assert stored.count(end) == 2  # the text "<|endoftext|>" ends no document
    assert info.train.dtype == "uint32" and info.train.vocab_size == 70_001
    assert info.train.tokenizer == "tokenizer.json"


@pytest.mark.parametrize(
    ("content", "end_token", "message"),
    [
        ("not json", None, "not valid JSON"),
        ("{}", None, "no 'model'"),
        ('{"model": {}}', None, r"bad\.json cannot be read"),
        (None, None, "neither 'bytes' nor a file"),
        ("words", "<stop>", "no token '<stop>'"),
    ],
)
def test_a_bad_tokenizer_is_refused(
    words: Path, tmp_path: Path, content: str | None, end_token: str | None, message: str
) -> None:
    path = words if content == "words" else tmp_path / "bad.json"
    if content is not None and content != "words":
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare([write_files(tmp_path / "s", {"a.txt": "one"})], tmp_path / "out", str(path), end_token=end_token)


def test_text_that_is_not_utf8_is_refused_or_skipped(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {"a.txt": b"ab\xff", "b.txt": "fine"})
    with pytest.raises(ValueError, match=r"a\.txt: the text is not valid UTF-8 .* at its byte 2.*invalid='skip'"):
        prepare([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    info = prepare([source], tmp_path / "skipped", invalid="skip")
    assert stored_tokens(Dataset(tmp_path / "skipped" / "train")) == tokens_of("fine")
    assert (info.train.num_documents, info.train.num_invalid) == (1, 1)
    assert "1 not valid UTF-8" in str(info)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not valid JSON"),
        (b'{"body": "a"}', 'string "text"'),
        (b'{"text": 3}', 'string "text"'),
        (b'["text"]', 'string "text"'),
        (b"[" * 100_000, "is not valid JSON .maximum recursion"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "is not valid JSON .Exceeds the limit"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    source = write_files(tmp_path / "source", {"a.jsonl": b'{"text": "good"}\n\n' + line + b"\n"})
    with pytest.raises(ValueError, match=rf"a\.jsonl line 3 .*{message}"):
        prepare([source], tmp_path / "out")


@pytest.mark.parametrize("line", [b'{"text": "a\\ud800b"}', b'{"text": "a\xffb"}'])
def test_a_json_line_that_is_not_utf8_is_named_or_skipped(tmp_path: Path, line: bytes) -> None:
    source = write_files(tmp_path / "source", {"a.jsonl": b'{"text": "good"}\n' + line})
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: the text is not valid UTF-8"):
        prepare([source], tmp_path / "out")
    prepare([source], tmp_path / "out", invalid="skip")
    assert stored_tokens(Dataset(tmp_path / "out" / "train")) == tokens_of("good")


def test_impossible_inputs_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_files(tmp_path / "empty", {"a.txt": ""})
    cases: list[tuple[str, Callable[[], object]]] = [
        ("neither a file nor a folder", lambda: prepare([tmp_path / "absent"], out)),
        (r"no file with suffix \.csv", lambda: prepare([source], out, suffixes=[".csv"])),
        ("train split has no tokens .1 empty", lambda: prepare([tmp_path / "empty"], out)),
        ("validation split has no tokens", lambda: prepare([source], out, holdout=1e-9)),
        ("reached twice", lambda: prepare([source, source / "aa"], out)),
        (r"holdout .* got 1", lambda: prepare([source], out, holdout=1.0)),
        (r"shard_tokens .* got 0", lambda: prepare([source], out, shard_tokens=0)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "source"]  # nothing half made is left


def test_excluded_folders_are_not_entered(source: Path, tmp_path: Path) -> None:
    assert prepare([source], tmp_path / "out", exclude=["aa"]).train.num_documents == 2


def test_the_same_dataset_is_left_and_another_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([source], out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    again = prepare([source], out)
    assert not again.created and "already there" in str(again)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    for change in ({"holdout": 0.5}, {"shard_tokens": 8}, {"exclude": ["aa"]}):
        with pytest.raises(ValueError, match="other sources or options"):
            prepare([source], out, **change)  # type: ignore[arg-type]
    write_files(source, {"a.txt": "firsT"})
    with pytest.raises(ValueError, match="other sources or options"):
        prepare([source], out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_folder_that_is_no_dataset_is_left(source: Path, tmp_path: Path) -> None:
    precious = write_files(tmp_path / "precious", {"thesis.txt": "years of work"})
    for out in (precious, precious / "thesis.txt"):
        with pytest.raises(ValueError, match=r"never replaced.*is not a token dataset"):
            prepare([source], out)
    assert (precious / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert prepare([source], tmp_path / "empty").created


def test_a_partial_dataset_is_refused_and_can_be_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([source], out, shard_tokens=8, holdout=0.5)
    (out / "validation").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"is not a whole dataset.*validation"):
        prepare([source], out, shard_tokens=8, holdout=0.5)
    (tmp_path / "gone").rename(out / "validation")
    shard = out / "train" / "shard-00001.bin"
    data = shard.read_bytes()
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match=r"is not a whole dataset.*shard-00001\.bin: its checksum"):
        prepare([source], out, shard_tokens=8, holdout=0.5)
    shard.unlink()
    with pytest.raises(ValueError, match=r"is not a whole dataset.*shard-00001\.bin is missing.*remove the dataset"):
        prepare([source], out, shard_tokens=8, holdout=0.5)
    shutil.rmtree(out)
    assert prepare([source], out, shard_tokens=8, holdout=0.5).created
    assert not prepare([source], out, shard_tokens=8, holdout=0.5).created


def _prepare_and_say(source: Path, out: Path, barrier: object, answers: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    answers.put(prepare([source], out, holdout=0.4).created)  # type: ignore[attr-defined]


def test_two_processes_preparing_one_folder_leave_one_whole_dataset(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {f"{i}.txt": f"{i}" * 1000 for i in range(200)})
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    both = [
        context.Process(target=_prepare_and_say, args=(source, tmp_path / "out", barrier, answers)) for _ in range(2)
    ]
    for process in both:
        process.start()
    created = [answers.get(timeout=60) for _ in both]
    for process in both:
        process.join(60)
    assert sum(created) == 1
    for split in ("train", "validation"):
        dataset = Dataset(tmp_path / "out" / split)
        check_shards(dataset.folder, dataset.index, content=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


# Opening


def test_a_truncated_or_changed_shard_is_named(counting: Dataset) -> None:
    shard = counting.folder / "shard-00002.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"shard-00002\.bin has 126 bytes, the index says 128.*prepare"):
        Dataset(counting.folder)
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match=r"shard-00002\.bin: its checksum"):
        check_shards(counting.folder, counting.index, content=True)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.bin is missing"):
        Dataset(counting.folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"vocab_size": 257', '"vocab_size": 258', "own checksum"),
        ('"num_tokens": 64', '"num_tokens": 63', "own checksum"),
        ('"format": "pith-tokens-1"', '"format": "pith-tokens-2"', "'pith-tokens-2' is not 'pith-tokens-1'"),
        ('"format": "pith-tokens-1"', '"form": "other"', "not the index of a token dataset"),
        ("{", "", "not valid JSON"),
    ],
)
def test_a_changed_index_is_refused(counting: Dataset, old: str, new: str, message: str) -> None:
    index = counting.folder / "index.json"
    text = index.read_text()
    assert old in text
    index.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"index\.json.*{message}.*prepare"):
        Dataset(counting.folder)


def test_a_folder_that_is_no_split_says_what_to_do(counting: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name one of them"):
        Dataset(counting.folder.parent)
    with pytest.raises(ValueError, match="is not a token dataset"):
        Dataset(tmp_path / "absent")
    assert read_index(counting.folder) == counting.index


# Order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 97, 127, 128, 129, 1000, 4095, 4096, 4097])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for seed in (0, 1, -5, 2**70):
        order = sample_indices(np.arange(3 * n), n, seed).reshape(3, n)
        assert (np.sort(order, axis=1) == np.arange(n)).all()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [sample_indices(np.arange(4 * n), n, seed).reshape(4, n) for seed in range(3)]
    rows = np.concatenate(orders)
    for a in range(len(rows)):
        for b in range(a):
            assert (rows[a] == rows[b]).sum() < 15  # about 1 agreement by chance
    assert len({tuple(row) for row in sample_indices(np.arange(200 * 3), 3, 0).reshape(200, 3)}) == 6


def test_the_order_mixes_well() -> None:
    n, epochs = 64, 600
    order = sample_indices(np.arange(n * epochs), n, 11).reshape(epochs, n)
    expected = epochs / n
    for what in (order, (np.roll(order, -1, axis=1) - order) % n):  # where a sample lands; who follows whom
        counts = np.stack([np.bincount(what[:, place], minlength=n) for place in range(n - 1)])
        used = counts if what is order else counts[:, 1:]
        wanted = expected if what is order else epochs / (n - 1)
        chi2 = ((used - wanted) ** 2 / wanted).sum() / (used.shape[0] * (used.shape[1] - 1))
        assert 0.9 < chi2 < 1.1


def test_the_order_is_fixed_for_good() -> None:
    """A changed order would break every resumed run and golden trace: these numbers must never change."""
    assert sample_indices(np.arange(8, 20), 10, 1234).tolist() == PINNED_ORDER
    assert synthetic_tokens(np.array([0, 5]), 6, 97, 1).tolist() == PINNED_TOKENS


def test_large_positions_stay_exact() -> None:
    n = 2**40 + 3
    order = sample_indices(n * 7 + np.arange(1000), n, 5)
    assert len(set(order.tolist())) == 1000 and order.min() >= 0 and order.max() < n
    assert order.max() > n * 0.99


# Batches


def samples_in_order(data: Samples, position: int, count: int, sequence_length: int) -> list[list[int]]:
    indices = sample_indices(np.arange(position, position + count), data.num_samples(sequence_length), data.seed)
    return [data.read(indices[i : i + 1], sequence_length)[0].tolist() for i in range(count)]


def global_batch(data: Samples, position: int, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    batch = data.microbatch(position, batch_size, 1, 0, 0, 1, sequence_length)
    assert batch.padding is None
    return batch.tokens, batch.labels


def test_windows_meet_and_labels_are_the_next_tokens(counting: Dataset) -> None:
    S = 10
    text = stored_tokens(counting)
    assert counting.num_samples(S) == 99 and counting.num_samples(999) == 1 and counting.num_samples(1000) == 0
    tokens, labels = global_batch(counting, 0, 99, S)
    assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape == (99, S)
    order = sample_indices(np.arange(99), 99, counting.seed).tolist()
    predicted = Counter()
    for row in range(99):
        start = order[row] * S
        assert tokens[row].tolist() == text[start : start + S]
        assert labels[row].tolist() == text[start + 1 : start + S + 1]
        predicted.update(range(start + 1, start + S + 1))
    assert predicted == Counter(range(1, 991))  # in one epoch, each token once


@pytest.mark.parametrize("dataset", ["counting", "synthetic"])
def test_position_knows_neither_batch_size_nor_mesh(dataset: str, counting: Dataset) -> None:
    S, position, total = 10, 90, 24  # crosses the end of the first epoch of 99, or is well inside
    data: Samples = counting if dataset == "counting" else SyntheticDataset(50, 3, epoch_samples=99)
    expected = samples_in_order(data, position, total, S)
    for batch_size in (1, 3, 8, 24):
        rows = []
        for start in range(position, position + total, batch_size):
            tokens, labels = global_batch(data, start, batch_size, S)
            rows += torch.cat([tokens, labels[:, -1:]], dim=1).tolist()
        assert rows == expected
    for num_microbatches, data_ranks in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 3), (3, 8)]:
        rows = []
        for i in range(num_microbatches):
            for rank in range(data_ranks):
                batch = data.microbatch(position, total, num_microbatches, i, rank, data_ranks, S)
                assert batch.padding is None
                rows += torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1).tolist()
        assert rows == expected


def test_reading_draws_nothing_from_torch_or_numpy(counting: Dataset) -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    global_batch(counting, 0, 8, 10)
    global_batch(SyntheticDataset(50, 3, ignore_labels=True), 0, 8, 10)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index, union-attr]


def test_impossible_batches_are_refused(counting: Dataset) -> None:
    with pytest.raises(AssertionError, match="24 sequences in 5 micro-batches on 2 data ranks"):
        counting.microbatch(0, 24, 5, 0, 0, 2, 10)
    with pytest.raises(AssertionError):
        counting.microbatch(0, 1, 1, 0, 0, 1, 1000)
    for arguments in [(counting, 10, 8, None, 0, 3), (counting, 5000, 8)]:
        with pytest.raises(AssertionError, match="samples in batches of 8 on"):
            next(validation_batches(*arguments))


def test_validation_goes_in_order_and_pads_the_last_batch(counting: Dataset) -> None:
    S = 10
    text = np.array(stored_tokens(counting))
    one = list(validation_batches(counting, S, 8, limit=21))
    assert [len(batch.tokens) for batch in one] == [8, 8, 8]
    tokens = torch.cat([batch.tokens for batch in one])
    labels = torch.cat([batch.labels for batch in one])
    assert tokens[:21].flatten().tolist() == text[:210].tolist()
    assert labels[:21].flatten().tolist() == text[1:211].tolist()
    assert one[0].padding is None and one[1].padding is None and one[2].padding is not None
    assert (labels[21:] == IGNORED_LABEL).all()
    assert one[2].padding.tolist() == [[row >= 5] * S for row in range(8)]
    ranks = [list(validation_batches(counting, S, 8, 21, rank, 4)) for rank in range(4)]
    joined = [torch.cat([rank[k].labels for rank in ranks]) for k in range(3)]
    assert torch.equal(torch.cat(joined), labels)
    assert len(list(validation_batches(counting, S, 8))) == math.ceil(99 / 8)


def test_synthetic_data_has_structure_and_uneven_labels() -> None:
    V, S = 97, 64
    data = SyntheticDataset(V, 7, epoch_samples=512, ignore_labels=True)
    tokens, labels = global_batch(data, 0, 512, S)
    assert tokens.min() == 0 and tokens.max() == V - 1
    assert len({tuple(row) for row in tokens.tolist()}) == 512
    steps = (tokens[:, 1:] - tokens[:, :-1]) % V
    assert 0.75 < torch.isin(steps, torch.tensor([1, 3, 7, 12])).float().mean() < 0.85  # (7/8)^2 and chance
    kept = (labels != IGNORED_LABEL).sum(dim=1)
    assert set(kept.tolist()) == {S - S * e // 8 for e in range(9)}
    plain = global_batch(SyntheticDataset(V, 7, epoch_samples=512), 0, 512, S)[1]
    assert torch.equal(plain[labels != IGNORED_LABEL], labels[labels != IGNORED_LABEL])
    for ranks in (2, 4):
        counts = [int((data.microbatch(0, 8, 1, 0, r, ranks, S).labels >= 0).sum()) for r in range(ranks)]
        assert len(set(counts)) == ranks


def test_bigram_entropy_is_that_of_the_pair_counts(counting: Dataset, tmp_path: Path) -> None:
    tokens = stored_tokens(counting)
    pairs, firsts = Counter(itertools.pairwise(tokens)), Counter(tokens[:-1])
    expected = -sum(c * math.log(c / firsts[a]) for (a, _), c in pairs.items()) / (len(tokens) - 1)
    assert bigram_entropy(counting) == pytest.approx(expected, rel=1e-12) and expected > 0.01
    prepare([write_files(tmp_path / "ab", {"a.txt": "ab" * 5000})], tmp_path / "abs")
    assert bigram_entropy(Dataset(tmp_path / "abs" / "train")) < 0.002


def test_bigram_entropy_counts_pairs_across_chunks(counting: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bigram_entropy(counting)
    monkeypatch.setattr("pithtrain.data.dataset.CHUNK_TOKENS", 7)
    assert bigram_entropy(counting) == whole


def test_importing_data_does_not_import_torch() -> None:
    code = "import pithtrain.data, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
