"""`prepare`: same result whoever makes it, made once, never half, never at the expense of other files."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared_ops.data.__main__ import main
from shared_ops.data.corpus import find_documents
from shared_ops.data.manifest import load_manifest
from shared_ops.data.packing import PackedDataset
from shared_ops.data.prepare import prepare
from shared_ops.data.token_file import open_h5, open_tokens
from shared_ops.data.tokenizer import load
from shared_ops.errors import UserError, run_cli

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "shared_ops.data", "prepare"]


@pytest.fixture
def texts(tmp_path):
    """40 documents in nested folders, with copies, and content of every awkward kind."""
    root = tmp_path / "texts"
    for i in range(36):
        path = root / f"part{i % 3}" / f"text{i:02}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"chapter {i}\n" + f"word{i} and the next word {i * i}\n" * (i + 3))
    (root / "nul.bin").write_bytes(b"a\0b\0\0")
    (root / "broken.txt").write_bytes(b"ok \xff\xfe then \xc3\x28 and a genuine \xef\xbf\xbd")
    (root / "copy.txt").write_bytes((root / "part0" / "text00.md").read_bytes())
    (root / "blank.txt").write_bytes(b" \r\n")
    (root / "empty.py").touch()
    (root / "part1" / "empty.txt").touch()
    (root / ".hidden").write_text("hidden")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    return root


def make(texts, out, tokenizer="train:300", seed=0, split=(0.8, 0.2), workers=1, quiet=True):
    return prepare([str(texts)], out, tokenizer, seed, split, workers, quiet)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(folder):
    tokenizer = load(folder / "tokenizer.json").backend
    return {split: [tokenizer.decode(tokens.document(i)[1:-1].tolist(), skip_special_tokens=False)
                    for i in range(len(tokens))]
            for split, tokens in ((name, open_tokens(folder / name)) for name in ("train", "validation"))}


def test_every_text_is_kept_and_the_awkward_ones_are_counted(texts, tmp_path):
    manifest = make(texts, tmp_path / "out")
    found = decoded(tmp_path / "out")
    paths = [path for path in texts.rglob("*") if path.is_file() and "/." not in path.as_posix()]
    expected = [path.read_bytes().decode("utf-8", "replace") for path in paths]
    assert Counter(found["train"] + found["validation"]) == Counter(text for text in expected if text)
    assert "ok \ufffd\ufffd then \ufffd( and a genuine \ufffd" in expected
    assert (manifest.skipped_empty_documents, manifest.replaced_invalid_utf8) == (2, 3)
    assert 1 <= len(found["validation"]) <= 16


def test_copies_of_a_text_are_on_one_side(texts, tmp_path):
    for i in range(6):
        (texts / f"copy{i}.txt").write_bytes((texts / "copy.txt").read_bytes())
    for seed in range(3):
        make(texts, tmp_path / "out", seed=seed, split=(0.5, 0.5))
        found = decoded(tmp_path / "out")
        assert not set(found["train"]) & set(found["validation"])


def test_the_manifest_is_true(texts, tmp_path):
    manifest = make(texts, tmp_path / "out")
    train = Counter(open_tokens(tmp_path / "out" / "train").ids.tolist())
    total = sum(train.values())
    entropy = -sum(n / total * math.log(n / total) for n in train.values())
    validation = open_tokens(tmp_path / "out" / "validation").ids.tolist()
    cross = -sum(math.log((train[i] + 1) / (total + 300)) for i in validation) / len(validation)
    assert manifest.splits["train"].unigram_entropy == pytest.approx(entropy, abs=1e-9)
    assert manifest.splits["validation"].unigram_entropy == pytest.approx(cross, abs=1e-9)
    assert (manifest.splits["train"].tokens, manifest.vocab_size) == (total, 300)
    assert sum(part.documents for part in manifest.splits.values()) == 40
    assert sum(part.bytes for part in manifest.splits.values()) == sum(
        document.path.stat().st_size for document in find_documents([str(texts)]))
    assert set(manifest.files) == {path.name for path in (tmp_path / "out").iterdir()} - {"manifest.json"}
    for split in ("train", "validation"):
        tokens, h5 = open_tokens(tmp_path / "out" / split), open_h5(tmp_path / "out" / f"{split}.h5")
        assert h5.ids.tolist() == tokens.ids.tolist() and h5.offsets.tolist() == tokens.offsets.tolist()


def test_workers_process_and_place_do_not_show_in_the_result(texts, tmp_path):
    make(texts, tmp_path / "one", workers=1)
    (tmp_path / "moved").mkdir()
    moved = shutil.copytree(texts, tmp_path / "moved" / "elsewhere")
    command = [*COMMAND, "--source", str(moved), "--out", str(tmp_path / "two"), "--tokenizer", "train:300",
               "--split", "0.8,0.2", "--workers", "2", "--seed", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    one["manifest.json"], two["manifest.json"] = (
        {**json.loads(files["manifest.json"]), "source": None} for files in (one, two))
    assert one == two


def test_a_second_run_reuses_and_a_changed_one_does_not(texts, tmp_path, capsys):
    out = tmp_path / "out"
    first = make(texts, out)
    inode = (out / "train.bin").stat().st_ino
    assert make(texts, out, workers=2, quiet=False) == first
    assert (out / "train.bin").stat().st_ino == inode
    assert "reusing" in capsys.readouterr().out
    keys = {first.key}
    for changes in ({"seed": 1}, {"split": (0.5, 0.5)}, {"tokenizer": "train:301"}):
        keys.add(make(texts, out, **changes).key)
    path = texts / "part0" / "text00.md"
    path.write_text(path.read_text().replace("next", "same"))  # nothing but the content
    keys.add(make(texts, out).key)
    path.rename(path.with_name("text01.md"))  # nothing but the name
    keys.add(make(texts, out).key)
    (texts / "empty.py").unlink()  # nothing but the count of empty documents
    keys.add(make(texts, out).key)
    assert len(keys) == 7 and load_manifest(out).key in keys
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "texts"]


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "train.h5", "tokenizer.json"])
def test_a_damaged_folder_is_made_anew(texts, tmp_path, name):
    out = tmp_path / "out"
    make(texts, out)
    whole = content(out)
    for damage in (whole[name][:-1], whole[name][:-1] + bytes([whole[name][-1] ^ 1]), None):
        (out / name).write_bytes(damage) if damage is not None else (out / name).unlink()
        make(texts, out)
        assert content(out) == whole
    (out / name).write_bytes(whole[name][:-1])
    with pytest.raises(UserError, match=name):
        PackedDataset(out, "train", 8)


def test_a_killed_run_leaves_nothing_that_counts(texts, tmp_path):
    out = tmp_path / "out"
    # The second split's h5 file is the last but for the manifest: die just before it.
    program = f"""
import os, signal
from pathlib import Path
from shared_ops.data import build, prepare
write_h5 = build.write_h5
build.write_h5 = lambda prefix, size: (os.kill(os.getpid(), signal.SIGKILL) if prefix.name == "validation"
                                       else write_h5(prefix, size))
prepare.prepare([{str(texts)!r}], Path({str(out)!r}), "train:300", 3, (0.5, 0.5), 1)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".out.tmp" / "validation.idx").exists() and not out.exists()
    with pytest.raises(UserError, match="no prepared data"):
        load_manifest(out)
    make(texts, out)
    make(texts, tmp_path / "fresh")
    assert content(out) == content(tmp_path / "fresh")
    assert not (tmp_path / ".out.tmp").exists()


def test_an_error_or_full_disk_keeps_the_old_folder(texts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    make(texts, out)
    before = content(out)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shared_ops.data.build.write_h5", full)
        with pytest.raises(UserError, match="No space left"):
            make(texts, out, seed=5)
    with pytest.raises(UserError, match="yields at most"):
        make(texts, out, tokenizer="train:100000")
    assert content(out) == before and not (tmp_path / ".out.tmp").exists()


def test_two_processes_at_once(texts, tmp_path):
    command = [*COMMAND, "--source", str(texts), "--out", str(tmp_path / "out"), "--tokenizer", "train:300",
               "--split", "0.8,0.2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) for _ in range(2)]
    output = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sum("reusing" in out for out, _ in output) == 1
    make(texts, tmp_path / "alone")
    assert content(tmp_path / "out") == content(tmp_path / "alone")



def test_foreign_files_are_never_touched(texts, tmp_path):
    for name, text in [("notes.txt", "mine"), ("manifest.json", "{}"), ("train.bin", "mine")]:
        folder = tmp_path / f"foreign-{name}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(UserError, match="not made by this command"):
            make(texts, folder)
        assert content(folder) == {name: text.encode()}
    out = tmp_path / "out"
    first = make(texts, out)
    (out / "notes.txt").write_text("mine")
    assert make(texts, out) == first
    with pytest.raises(UserError, match="notes.txt"):
        make(texts, out, seed=1)
    assert (out / "notes.txt").read_text() == "mine" and load_manifest(out) == first
    with pytest.raises(UserError, match="is a file"):
        make(texts, texts / "copy.txt")
    (tmp_path / "empty").mkdir()
    assert make(texts, tmp_path / "empty").key == first.key


def test_the_output_inside_the_source_is_no_input(texts):
    first = make(texts, texts / "data")
    assert make(texts, texts / "data") == first
    assert first.splits["train"].documents + first.splits["validation"].documents == 40


def test_overlapping_paths_and_links_count_once(texts, tmp_path):
    (texts / "link.txt").symlink_to(texts / "nul.bin")
    (texts / "dangling.txt").symlink_to(texts / "nowhere")
    (texts / "loop").symlink_to(texts)
    os.mkfifo(texts / "pipe")
    once = find_documents([str(texts)])
    twice = find_documents([str(texts), str(texts / "part1"), str(texts / "nul.bin"), f"{texts}/../texts"])
    assert len(once) == 42 and once == twice
    assert [document.name for document in once] == sorted(document.name for document in once)


def test_stdlib_is_python_without_tests_and_packages():
    names = [document.name for document in find_documents(["stdlib"])]
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} <= set(names) and len(names) > 300
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in names) and names == sorted(names)


@pytest.mark.parametrize("count", [2, 3])
def test_few_documents_fill_both_splits(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    for seed in range(3):
        for split in ((0.999999, 0.000001), (0.000001, 0.999999)):
            manifest = prepare([str(tmp_path)], tmp_path / ".out", "train:259", seed, split, 1, quiet=True)
            assert all(part.documents for part in manifest.splits.values())


def test_no_validation_on_request(texts, tmp_path):
    manifest = make(texts, tmp_path / "out", split=(1, 0))
    validation = manifest.splits["validation"]
    assert (validation.documents, validation.tokens, validation.unigram_entropy) == (0, 0, None)


def test_a_tokenizer_file_is_taken_as_it_is(texts, tmp_path):
    make(texts, tmp_path / "first")
    again = make(texts, tmp_path / "second", tokenizer=str(tmp_path / "first" / "tokenizer.json"), workers=2)
    first, second = content(tmp_path / "first"), content(tmp_path / "second")
    assert {name for name in first if first[name] != second[name]} == {"manifest.json"}
    assert again.tokenizer == "tokenizer.json" and again.vocab_size == 300


@pytest.mark.parametrize("arguments, message", [
    (["--source", "nowhere"], "nowhere"),
    (["--source", "/dev/null"], "/dev/null"),
    (["--source", "{empty}"], "no documents"),
    (["--source", "{hollow}"], "all 1 documents are empty"),
    (["--tokenizer", "train:10"], "at least 259"),
    (["--tokenizer", "train:99999"], "use train:"),
    (["--tokenizer", "nowhere.json"], "nowhere.json"),
    (["--split", "0.9"], "split"),
    (["--split", "a,b"], "split a,b"),
    (["--split", "0.9,0.2"], "split 0.9,0.2"),
    (["--split", "0,1"], "split 0,1"),
    (["--split", "nan,nan"], "split"),
    (["--workers", "0"], "workers 0"),
    (["--out", "{texts}"], "not empty"),
    (["--out", "/dev/null/out"], "/dev/null"),
])
def test_wrong_arguments_are_named(texts, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "empty.txt").touch()
    places = {"texts": texts, "empty": tmp_path / "empty", "hollow": tmp_path / "hollow"}
    given = {"--source": str(texts), "--out": str(tmp_path / "out"), "--tokenizer": "train:300"}
    given |= {arguments[0]: arguments[1].format(**places)}
    before = content(texts / "part0")
    assert run_cli(main, ["prepare", *(word for pair in given.items() for word in pair)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists() and content(texts / "part0") == before


def test_the_command_itself(tmp_path):
    wrong = subprocess.run([*COMMAND, "--source", "nowhere", "--out", str(tmp_path / "out")], cwd=REPOSITORY,
                           capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "nowhere" in wrong.stderr
    usage = subprocess.run([*COMMAND, "--help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert usage.returncode == 0
    assert all(word in usage.stdout for word in ("stdlib", "train:N|FILE", "--workers"))
