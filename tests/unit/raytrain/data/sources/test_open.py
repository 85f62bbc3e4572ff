"""Sources: text, standard library, IDX, in-memory data and the user's own function; keys and their errors."""

from __future__ import annotations

import gzip
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.config.sections import DataConfig, ModelConfig
from raytrain.data.rows.contract import Source
from raytrain.data.rows.splits import TensorSplit
from raytrain.data.sources.open import describe_shapes, describe_source, open_source, read_on_driver, source_from_driver
from raytrain.data.sources.sections import is_path_key
from raytrain.data.sources.text import read_stdlib, text_source
from raytrain.data.sources.tokenised import resolve_text_keys
from raytrain.errors import InputError
from raytrain.runs.storage import locate, read_bytes

REPOSITORY = Path(__file__).resolve().parents[5]


def opened(*, context: int | None = 8, **section: Any) -> Source:
    return open_source(DataConfig(**section), context=context)


def refused(*, context: int | None = 8, **section: Any) -> InputError:
    """The error of opening; describing must refuse it too."""
    data = DataConfig(**section)
    with pytest.raises(InputError) as described:
        describe_source(data, context=context)
    with pytest.raises(InputError) as caught:
        open_source(data, context=context)
    assert described.value.key == caught.value.key
    return caught.value


def write_text(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def write_idx(folder: Path, name: str, values: np.ndarray, *, magic: int = 8, zipped: bool = False) -> str:
    data = struct.pack(f">BBBB{values.ndim}I", 0, 0, magic, values.ndim, *values.shape) + values.tobytes()
    path = folder / name
    path.write_bytes(gzip.compress(data) if zipped else data)
    return str(path)


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.covers("LOOP-19")
def test_two_files_are_their_concatenation_and_the_tokens_are_counted(tmp_path: Path) -> None:
    first, second = "To be, or not to be.\r\n" * 40, "Ünï ☃\n" * 60
    paths = [write_text(tmp_path, "b.txt", first), write_text(tmp_path, "a.txt", second)]
    both = opened(source="text", path=paths)
    joined = opened(source="text", path=write_text(tmp_path, "joined.txt", first + second))
    tokens = torch.cat([both.train.tokens, both.eval.tokens])
    assert bytes(tokens.tolist()) == (first + second).encode()
    assert torch.equal(both.train.tokens, joined.train.tokens) and torch.equal(both.eval.tokens, joined.eval.tokens)
    count = f"{len((first + second).encode()):,} bytes"
    assert count in both.describe and count in both.facts.reason
    assert count in describe_source(DataConfig(source="text", path=paths), context=8).reason


@pytest.mark.parametrize("vocabulary", ["bytes", "chars"])
def test_text_is_cut_and_described_as_it_is_opened(tmp_path: Path, vocabulary: str) -> None:
    text = "abcdefgh\n" * 111
    section = {"source": "text", "path": write_text(tmp_path, "t.txt", text), "vocabulary": vocabulary}
    source = opened(**section)
    cut = int(len(text) * 0.9)
    assert source.decode(source.train.tokens.tolist()) == text[:cut]
    assert source.decode(source.eval.tokens.tolist()) == text[cut:]
    facts, seen = source.facts, describe_source(DataConfig(**section), context=8)
    assert facts.train_rows == seen.train_rows == len(source.train) == (cut - 8) // 8
    assert facts.eval_rows == seen.eval_rows == len(source.eval.eval_order())
    assert facts.total_bytes == len(text) and facts.tokens_per_row == 8 and facts.row_bytes == 8
    assert seen.vocab_size == (256 if vocabulary == "bytes" else None)
    assert source.vocab_size == (256 if vocabulary == "bytes" else 9)


def test_characters_are_numbered_by_code_point_over_all_texts(tmp_path: Path) -> None:
    train, other = write_text(tmp_path, "t", "héllo ☃ 𐎀\n" * 20), write_text(tmp_path, "e", "zebra\n" * 20)
    source = opened(source="text", path=train, eval_path=other, vocabulary="chars")
    characters = sorted(set("héllo ☃ 𐎀\nzebra"))
    assert source.vocab_size == len(characters)
    assert source.encode("".join(characters)) == list(range(len(characters)))
    assert source.decode(source.encode("zoo ☃")) == "zoo ☃"
    assert source.decode(source.eval.tokens.tolist()) == "zebra\n" * 20
    assert source.decode(source.train.tokens.tolist()) == "héllo ☃ 𐎀\n" * 20
    with pytest.raises(InputError, match=r"data.vocabulary: got the character 'q'"):
        source.encode("qq")
    assert pickle.loads(pickle.dumps(source.decode))([0]) == "\n"


def test_more_than_256_characters_are_kept_in_two_bytes() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 400))) * 3
    source = text_source(text.encode(), context=8, vocabulary="chars")
    assert source.vocab_size == 400 and source.train.tokens.element_size() == 2
    assert source.decode(source.train.gather(np.array([392]))["labels"][0].tolist()) == text[393:401]


def test_any_bytes_can_be_decoded() -> None:
    source = text_source(b"\xff\xfe" + bytes(range(250)) * 2, context=4)
    assert source.decode([0xC3, 0xA9, 0xFF]) == "é�" and source.encode("é") == [0xC3, 0xA9]


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True, "abc", [8]])
def test_a_wrong_context_is_refused_by_every_source_of_text(tmp_path: Path, wrong: Any) -> None:
    path = write_text(tmp_path, "t", "some text " * 100)
    sections = [{"source": "text", "path": path}, {"source": "stdlib", "max_bytes": 4096}, {"train": b"text " * 100}]
    for section in sections:
        error = refused(**section, context=wrong)
        assert error.key == "model.context" and error.expected == "an integer >= 1"
    data = DataConfig(source="jsonl", path=path, text_field="text", tokenizer="folder")
    with pytest.raises(InputError, match=r"model\.context: got .*, expected an integer >= 1"):
        resolve_text_keys(data, ModelConfig(builder="raytrain.models.gpt:gpt", context=wrong))


def test_a_class_in_place_of_a_dataset_is_named() -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

    error = refused(train=Rows)
    assert error.key == "data.train" and error.got == "the class Rows" and error.remedy == "write Rows(...)"


def test_without_held_out_rows_there_is_no_evaluation(tmp_path: Path) -> None:
    section = {"source": "text", "path": write_text(tmp_path, "t", "x" * 100), "eval_fraction": 0.0}
    assert opened(**section).eval is None
    assert describe_source(DataConfig(**section), context=8).eval_rows == 0


@pytest.mark.parametrize(
    ("text", "context", "seen", "expected"),
    [
        ("x" * 16, 8, "14 tokens for training", "at least 16 with model.context 8"),
        ("x" * 60, 8, "6 tokens for evaluation", "at least 9 with model.context 8"),
    ],
)
def test_a_text_too_short_for_its_windows(tmp_path: Path, text: str, context: int, seen: str, expected: str) -> None:
    error = refused(source="text", path=write_text(tmp_path, "t", text), context=context)
    assert (error.key, error.got, error.expected) == ("data.path", seen, expected)
    assert "data.eval_fraction" in error.remedy


def test_files_that_cannot_be_text(tmp_path: Path) -> None:
    missing = refused(source="text", path=str(tmp_path / "none.txt"))
    assert missing.key == "data.path" and "no file at" in missing.got and "none.txt" in missing.got
    folder = refused(source="text", path=str(tmp_path))
    assert str(tmp_path) in folder.got and "a directory" in folder.got
    assert "an empty file" in refused(source="text", path=write_text(tmp_path, "empty", "")).got
    good = write_text(tmp_path, "good", "x" * 100)
    assert refused(source="text", path=good, eval_path=str(tmp_path / "no")).key == "data.eval_path"
    assert refused(source="text", path=good, context=None).key == "model.context"
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(InputError, match=r"data.vocabulary: got chars, and byte 3 of .*latin is not valid UTF-8"):
        opened(source="text", path=str(tmp_path / "latin"), vocabulary="chars")


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_text(tmp_path, "t.txt", "x" * 100)
    monkeypatch.setattr("builtins.open", denied)  # root may read everything, so the mode bits prove nothing
    with pytest.raises(InputError, match=r"data.path: got no permission to read .*t.txt"):
        read_bytes(path, key="data.path")


def test_a_path_may_be_a_uri(tmp_path: Path) -> None:
    path = write_text(tmp_path, "t.txt", "some text " * 40)
    assert torch.equal(
        opened(source="text", path=f"file://{path}").train.tokens, opened(source="text", path=path).train.tokens
    )
    with pytest.raises(InputError, match=r"data.path: got nowhere://bucket/file .*expected a local path or a URI"):
        locate("nowhere://bucket/file", key="data.path")


def test_the_standard_library_is_the_same_text_each_time_and_handed_over() -> None:
    text = read_stdlib(200_000)
    assert len(text) == 200_000 and text == read_stdlib(200_000)
    assert text.startswith(read_stdlib(1000)) and b"import" in text
    data = DataConfig(source="stdlib", max_bytes=200_000)
    facts = describe_source(data, context=64)
    sent = read_on_driver(data)
    assert sent == text
    there, here = source_from_driver(sent, data, context=64), open_source(data, context=64)
    assert torch.equal(there.train.tokens, here.train.tokens) and there.facts == here.facts
    assert (facts.train_rows, facts.eval_rows) == (here.facts.train_rows, here.facts.eval_rows)
    assert read_on_driver(DataConfig(train=b"x" * 99)) is None and source_from_driver(None, data, context=64) is None


# -- IDX -------------------------------------------------------------------------------------------


def images(count: int, *, size: tuple[int, int] = (4, 5)) -> tuple[np.ndarray, np.ndarray]:
    pixels = (np.arange(count * size[0] * size[1]) % 256).astype(np.uint8).reshape(count, *size)
    return pixels, (np.arange(count) % 7).astype(np.uint8)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_images_are_scaled_at_gather_and_described_from_their_headers(tmp_path: Path, zipped: bool) -> None:
    pixels, labels = images(50)
    section = {
        "source": "idx",
        "images": write_idx(tmp_path, "images", pixels, zipped=zipped),
        "labels": write_idx(tmp_path, "labels", labels, zipped=zipped),
    }
    source = opened(**section)
    assert len(source.train) == 45 and len(source.eval) == 5 and source.classes == 7
    assert source.train.nbytes == 45 * 21, "kept as bytes"
    every = [split.gather(split.eval_order()) for split in (source.train, source.eval)]
    x, y = torch.cat([part["x"] for part in every]), torch.cat([part["labels"] for part in every])
    assert x.shape == (50, 1, 4, 5) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert float(x.min()) >= 0 and float(x.max()) == 1.0
    rows = {tuple(row.flatten().tolist()) for row in torch.from_numpy(pixels).float() / 255}
    assert {tuple(row.flatten().tolist()) for row in x} == rows
    assert describe_source(DataConfig(**section), context=None) == source.facts
    assert describe_shapes(DataConfig(**section)) == {"image_shape": (1, 4, 5), "num_features": 20, "num_classes": 7}


def test_idx_accepts_a_second_pair_of_files_for_evaluation(tmp_path: Path) -> None:
    pixels, labels = images(30)
    section = {
        "source": "idx",
        "images": write_idx(tmp_path, "i", pixels),
        "labels": write_idx(tmp_path, "l", labels),
        "eval_images": write_idx(tmp_path, "ei", pixels[:8]),
        "eval_labels": write_idx(tmp_path, "el", labels[:8] + 3),
    }
    source = opened(**section)
    assert len(source.train) == 30 and len(source.eval) == 8 and source.classes == 10
    assert describe_source(DataConfig(**section), context=None) == source.facts
    assert refused(**{**section, "eval_labels": None}).key == "data.eval_labels"
    other = write_idx(tmp_path, "other", images(8, size=(5, 5))[0])
    with pytest.raises(InputError, match=r"data.eval_images: got images of \(1, 5, 5\)"):
        opened(**{**section, "eval_images": other})


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    pixels, labels = images(20)
    good, marks = write_idx(tmp_path, "i", pixels), write_idx(tmp_path, "l", labels)
    section = {"source": "idx", "images": good, "labels": marks}
    fewer = refused(**{**section, "labels": write_idx(tmp_path, "few", labels[:19])})
    assert fewer.key == "data.labels" and "19 labels" in fewer.got and "20" in fewer.expected
    swapped = refused(**{**section, "images": marks, "labels": good})
    assert swapped.key == "data.images" and "shape (20,)" in swapped.got
    floats = refused(**{**section, "images": write_idx(tmp_path, "f", pixels, magic=0x0D)})
    assert "0x0d" in floats.got
    text = refused(**{**section, "images": write_text(tmp_path, "t", "hello world")})
    assert text.key == "data.images" and "68656c6c" in text.got
    assert "shape (0, 4, 5)" in refused(**{**section, "images": write_idx(tmp_path, "none", pixels[:0])}).got
    (tmp_path / "cut").write_bytes(Path(good).read_bytes()[:-7])
    with pytest.raises(InputError, match=r"data.images: got 393 bytes of values.*expected 400"):
        opened(**{**section, "images": str(tmp_path / "cut")})
    zipped = Path(write_idx(tmp_path, "z.gz", pixels, zipped=True)).read_bytes()
    (tmp_path / "z.gz").write_bytes(zipped[: len(zipped) // 2])
    with pytest.raises(InputError, match=r"data.images: got a damaged gzip file"):
        opened(**{**section, "images": str(tmp_path / "z.gz")})


# -- in memory, and the user's own ---------------------------------------------------------------------


def test_tensors_arrays_and_lists_in_memory() -> None:
    train = {"x": torch.rand(40, 3), "labels": np.arange(40, dtype=np.int32) % 4, "w": [0.5] * 40}
    source = opened(train=train)
    assert isinstance(source.train, TensorSplit) and len(source.train) == 36 and len(source.eval) == 4
    batch = source.train.gather(np.array([0, 5]))
    assert batch["labels"].dtype == torch.int64 and batch["w"].dtype == torch.float32 and source.classes == 4
    facts = describe_source(DataConfig(train=train), context=None)
    assert (facts.train_rows, facts.eval_rows) == (36, 4)
    both = opened(train=train, eval={name: values[:7] for name, values in train.items()})
    assert len(both.train) == 40 and len(both.eval) == 7
    assert opened(train=train, eval_fraction=0.0).eval is None


def test_bytes_in_memory_are_a_text() -> None:
    source = opened(train=b"what is it " * 30, vocabulary="chars")
    assert source.vocab_size == 7 and source.decode(source.encode("what")) == "what"
    assert opened(train=b"x" * 100, eval=b"y" * 50).eval.tokens.tolist() == [121] * 50
    assert refused(train=b"x" * 100, eval={"x": torch.ones(3)}).key == "data.eval"
    assert refused(train=b"x").key == "data.train"


def test_numbers_of_numpy_arrive_in_every_byte_order_and_type() -> None:
    swapped = np.arange(6, dtype=">f4").reshape(3, 2)
    source = opened(train={"x": swapped, "labels": np.array([0, 1, 0], ">i8")}, eval_fraction=0.0)
    assert source.train.gather(np.arange(3))["x"].tolist() == swapped.tolist()
    unmasked = np.ma.masked_array(np.ones((4, 2)), mask=False)
    assert opened(train={"x": unmasked}, eval_fraction=0.0).train.gather(np.arange(4))["x"].sum() == 8
    items = [{"x": np.ones(2, np.float32), "labels": np.uint64(number % 2)} for number in range(4)]
    assert opened(train=items, eval_fraction=0.0).train.gather(np.arange(4))["labels"].tolist() == [0, 1, 0, 1]


def test_a_number_that_no_tensor_holds_is_named() -> None:
    with pytest.raises(InputError, match=r"18446744073709551616.* in an item, expected numbers of at most 64 bits"):
        opened(train=[{"x": [2**64, 1, 2]}] * 4, eval_fraction=0.0)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("train", "seen"),
    [
        ({"x": torch.ones(5), "labels": torch.ones(4)}, "5 in 'x', 4 in 'labels'"),
        ({"x": torch.ones(0, 3)}, "0 rows"),
        ({}, "0 rows"),
        ({"x": torch.ones(3), "labels": torch.tensor([0, -1, 2])}, "the class -1 in column 'labels' row 1"),
        ({"x": torch.tensor([[1.0, 2.0], [3.0, float("nan")]])}, "NaN in column 'x' row 1"),
        ({"x": np.array([1.0, -np.inf])}, "-inf in column 'x' row 1"),
        ({"x": [[1.0], [2.0, float("inf")]]}, "inf in column 'x' row 1"),
        ({"x": ["a", "b"]}, "'x' is a list that is not a column of numbers"),
        (
            {"x": np.ma.masked_array(np.ones((4, 2)), mask=np.eye(4, 2) > 0)},
            "'x' is a MaskedArray that is not a column of numbers (2 masked",
        ),
        ({"x": np.ones(4, np.longdouble)}, "numbers (values of type float128"),
        ({"x": torch.tensor(3.0)}, "'x' is a single number"),
        (torch.ones(3, 2), "a Tensor"),
        ((torch.ones(3), torch.ones(3)), "a tuple"),
        (Endless(), "a Endless"),
        ([], "0 rows in the list"),
        (object(), "a object"),
        (["text", "lines"], "an item that is a str"),
    ],
)
def test_objects_that_are_not_datasets_are_named(train: Any, seen: str) -> None:
    with pytest.raises(InputError) as caught:
        opened(train=train)
    assert caught.value.key == "data.train" and seen in caught.value.got


OWN = """
import torch
calls = []

def dataset(rows, *, scale=1.0, seed=None):
    calls.append(seed)
    return {"train": {"x": torch.arange(rows) * scale}, "eval": [(torch.ones(2), 1)] * 3}

def train_only():
    return {"train": [{"x": torch.tensor(float(i)), "labels": i % 2} for i in range(20)]}

def no_eval():
    return {"train": {"x": torch.zeros(20)}, "eval": None}

def wrong():
    return [1, 2]

def misspelt():
    return {"training": {}}

def broken():
    return {"train": {"x": torch.full((4,), float("nan"))}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rows_of_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rows_of_data", raising=False)
    return "my_rows_of_data"


def test_a_function_of_the_users_gets_every_key_that_is_not_ours(own: str) -> None:
    source = opened(source=f"{own}:dataset", rows=30, scale=2.0, storage="stream", eval_fraction=0.2)
    assert source.train.gather(np.array([29]))["x"].tolist() == [58.0] and len(source.eval) == 3
    assert sys.modules[own].calls == [None], "a parameter named seed is the function's own"
    opened(source=f"{own}:dataset", rows=3, seed=5)
    assert sys.modules[own].calls[1] == 5
    assert describe_source(DataConfig(source=f"{own}:dataset", rows=30), context=None) is None
    assert len(opened(source=f"{own}:train_only").eval) == 2
    assert opened(source=f"{own}:no_eval").eval is None


@pytest.mark.parametrize(
    ("function", "keys", "key", "seen"),
    [
        ("dataset", {}, "data.rows", ""),
        ("dataset", {"rows": 3, "skale": 2.0}, "data.skale", ""),
        ("wrong", {}, "data.source", "returned a list"),
        ("misspelt", {}, "data.source", "the keys training"),
        ("broken", {}, "data.source", "NaN in column 'x' row 0"),
        ("absent", {}, "data.source", "absent"),
    ],
)
def test_wrong_functions_of_the_users_are_named(own: str, function: str, keys: dict, key: str, seen: str) -> None:
    with pytest.raises(InputError) as caught:
        opened(source=f"{own}:{function}", **keys)
    assert caught.value.key.startswith(key) and seen in caught.value.got


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"source": "txt"}, "data.source", "did you mean text?"),
        ({"source": "text"}, "data.path", "a path or a list of paths"),
        ({"source": "text", "path": 7}, "data.path", "7 (an integer)"),
        ({"source": "text", "path": []}, "data.path", "[] (a list)"),
        ({"source": "text", "path": None}, "data.path", "got null"),
        ({"source": "text", "paths": "x"}, "data.paths", "did you mean data.path?"),
        ({"source": "text", "path": "x", "vocabulary": "words"}, "data.vocabulary", "bytes or chars"),
        ({"source": "stdlib", "max_bytes": True}, "data.max_bytes", "true (a boolean)"),
        ({"source": "idx", "images": "x"}, "data.labels", "keys of the source idx: images, labels"),
        ({"source": "csv", "path": "x", "features": "a"}, "data.features", "a list of column names"),
        ({"source": "parquet", "path": "x", "label": 3}, "data.label", "3 (an integer)"),
        ({"source": "csv", "path": "x", "features": ["a", "a"]}, "data.features", "a list of column names"),
        ({"source": "jsonl", "path": "x", "class_names": ["a", "b", "a"]}, "data.class_names", "a list of names"),
        ({}, "data.source", "module:function"),
        ({"source": "text", "path": "x", "train": {"x": torch.ones(2)}}, "data.source", "together with data.train"),
        ({"eval": {"x": torch.ones(2)}}, "data.eval", "without data.train"),
        ({"train": {"x": torch.ones(2)}, "vocabulary": "chars"}, "data.vocabulary", "no keys for it"),
    ],
)
def test_wrong_keys_of_a_source_are_named(section: dict[str, Any], key: str, words: str) -> None:
    error = refused(**section)
    assert error.key == key and words in str(error)


def test_the_keys_that_hold_paths_are_known() -> None:
    names = ("path", "eval_path", "tokenizer", "images", "labels", "eval_images", "eval_labels", "my_file", "label", 3)
    paths = {
        source: {name for name in names if is_path_key(source, name)}
        for source in ("text", "csv", "idx", "stdlib", "my.module:function", None)
    }
    assert paths["text"] == {"path", "eval_path", "tokenizer"} and paths["csv"] == {"path", "eval_path"}
    assert paths["idx"] == {"images", "labels", "eval_images", "eval_labels"}
    assert paths["my.module:function"] == {"path", "eval_path", "my_file"}
    assert not any(paths[source] for source in ("stdlib", None)) and not is_path_key(["csv"], "path")


def test_describing_imports_no_torch(tmp_path: Path) -> None:
    text = write_text(tmp_path, "t", "x" * 500)
    pixels, labels = images(20)
    files = {"images": write_idx(tmp_path, "i", pixels), "labels": write_idx(tmp_path, "l", labels)}
    table = write_text(tmp_path, "t.csv", "a,b\n" + "1.5,0\n" * 20)
    script = f"""
import sys
from raytrain.config.sections import DataConfig
from raytrain.data.sources.open import describe_shapes, describe_source
from raytrain.data.sources.open import read_on_driver
for data in (DataConfig(source="text", path={text!r}), DataConfig(source="stdlib", max_bytes=9000),
             DataConfig(source="idx", **{files!r}), DataConfig(source="csv", path={table!r}, label="b"),
             DataConfig(source="mine:rows"), DataConfig(train=b"x" * 400)):
    print(describe_source(data, context=16), describe_shapes(data), read_on_driver(data) is None)
assert "torch" not in sys.modules and "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=REPOSITORY)


def test_both_splits_have_a_mask_if_the_rows_of_either_differ_in_length() -> None:
    equal, ragged = {"x": [[1.0, 2.0], [3.0, 4.0]]}, {"x": [[1.0], [3.0, 4.0]]}
    for train, held in ((equal, ragged), (ragged, equal)):
        source = opened(train=train, eval=held)
        for split in (source.train, source.eval):
            assert split is not None and "attention_mask" in split.gather(np.array([1]))
    assert "attention_mask" not in opened(train=equal, eval=equal).train.gather(np.array([1]))
