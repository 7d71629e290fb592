"""Files that a command writes: which it refuses, and what becomes of those that were there."""

import os
from pathlib import Path

import pytest

from thinwire.files import write_atomically
from thinwire_lab.inputs import BadInput, append_line, check_writable, prepare_file, read_lines


@pytest.mark.parametrize("kind", ["pipe", "circle", "long"])
def test_what_is_no_file_is_refused_before_anything_is_measured(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("n" * 300 if kind == "long" else kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    with pytest.raises(BadInput, match=f"cannot write .*/{path.name}; expected a file"):
        check_writable([path])


def test_a_link_stays_one_and_leads_to_what_was_written(tmp_path: Path) -> None:
    link, there = tmp_path / "link", tmp_path / "there"
    there.write_text("before")
    link.symlink_to(there)
    write_atomically(link, "after")
    assert link.is_symlink()
    assert there.read_text() == "after"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    check_writable([path])
    write_atomically(path, "text")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    prepare_file(tmp_path / "new" / "folder" / "found.json")
    assert (tmp_path / "new" / "folder").is_dir()
    prepare_file(None)


def test_a_line_that_was_cut_off_is_named_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for seed in range(2):
        append_line(path, {"seed": seed})
    whole = path.read_text()
    path.write_text(whole[:-4])
    with pytest.raises(BadInput, match=r"runs.jsonl cannot be used .* in line 2; .* remove that line"):
        read_lines(path)
    path.write_text(whole)
    assert read_lines(path) == [{"seed": 0}, {"seed": 1}]
