"""A run's folder: whole parts, of one run's settings, written by one process at a time, whatever kills it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from lrpx.errors import DataError, ResultFileError
from lrpx.runs import Store, digest, read_table, write_table

COLUMNS = pa.schema({"id": pa.string(), "values": pa.list_(pa.float64()), "right": pa.bool_()})
TABLE = pa.Table.from_pylist(
    [{"id": f"a{i}", "values": [0.5 * i, 2.0], "right": i % 2 == 0} for i in range(3)], COLUMNS
)
SETTINGS = {"model": "gpt2", "methods": ["lrp"], "limit": None}
VERSIONS = {"python": "3.11", "torch": "2.13"}

HOLDER = """
import sys, time
from pathlib import Path
from lrpx.runs import Store
with Store.begin(Path(sys.argv[1]), "test", {"a": 1}, {}) as store:
    store.note()
    print("held", flush=True)
    time.sleep(60)
"""


def begin(folder, settings=SETTINGS, kind="test", versions=VERSIONS):
    return Store.begin(folder, kind, settings, versions)


@pytest.fixture
def folder(tmp_path):
    """A run with one part."""
    with begin(tmp_path / "run") as store:
        store.note(command="lrpx test")
        store.keep("00000", TABLE)
    return tmp_path / "run"


def test_what_was_kept_is_read_again(folder):
    with begin(folder) as store:
        assert store.part("00000", COLUMNS).equals(TABLE)
        assert store.part("00001", COLUMNS) is None
        assert store.part("00000", pa.schema({"id": pa.string()})) is None
    read = Store.read(folder)
    assert read.settings == SETTINGS
    assert read.record["command"] == "lrpx test"
    assert read.checked_parts() == [folder / "rows" / "part-00000.parquet"]


def test_the_same_rows_have_the_same_bytes(folder, tmp_path):
    with begin(tmp_path / "other") as store:
        store.note()
        store.keep("00000", TABLE.slice(0, 3))
    parts = [each / "rows" / "part-00000.parquet" for each in (folder, tmp_path / "other")]
    assert parts[0].read_bytes() == parts[1].read_bytes()


# ------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SETTINGS | {"methods": ["alti"]}, r'methods was \["lrp"\] and is \["alti"\] now; name another folder'),
        (SETTINGS | {"new": 1}, "new was null and is 1 now"),
    ],
)
def test_a_run_goes_on_with_its_own_settings_alone(folder, settings, message):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ResultFileError, match=message), begin(folder, settings):
        pass
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_kind_of_run_is_refused(folder):
    with pytest.raises(ResultFileError, match="holds a run of test, not of other"), begin(folder, kind="other"):
        pass


def test_settings_may_change_until_there_are_parts(tmp_path):
    for limit in (1, 2):
        with begin(tmp_path, {"limit": limit}) as store:
            store.note()
    assert Store.read(tmp_path).settings == {"limit": 2}


def test_a_part_of_other_settings_is_none_of_this_run(folder, tmp_path):
    other = tmp_path / "other"
    with begin(other, SETTINGS | {"model": "gpt3"}) as store:
        store.note()
        store.keep("00000", TABLE)
        assert store.part("00000", COLUMNS) is not None
    stolen = folder / "rows" / "part-00000.parquet"
    stolen.write_bytes((other / "rows" / "part-00000.parquet").read_bytes())
    with begin(folder) as store:
        assert store.part("00000", COLUMNS) is None
    with pytest.raises(ResultFileError, match=r"part-00000\.parquet are of a run with other settings; run it again"):
        Store.read(folder).checked_parts()


def test_settings_changed_by_hand_are_seen(folder):
    record = json.loads((folder / "run.json").read_text())
    record["settings"]["model"] = "gpt3"
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(ResultFileError, match="its digest is not that of its settings"):
        Store.read(folder)
    with pytest.raises(ResultFileError, match=r"run\.json is not the record of a run"), begin(folder):
        pass


def test_the_digest_is_of_kind_and_settings():
    assert len({digest("a", {}), digest("b", {}), digest("a", {"x": 0}), digest("a", {"x": None})}) == 4


def test_versions_are_listed_and_may_differ(folder):
    for version in ("2.14", "2.13", "2.14"):
        with begin(folder, versions={"torch": version}) as store:
            store.note()
    assert Store.read(folder).record["versions"]["torch"] == "2.13, 2.14"


# ------------------------------------------------------------------------------ whole or not at all


def test_no_flipped_bit_goes_unseen(tmp_path):
    path, table = tmp_path / "part.parquet", TABLE.select(["id"])
    write_table(path, table, "ab")
    whole = path.read_bytes()
    assert read_table(path, table.schema, "ab").equals(table)
    wrong = []
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        found = read_table(path, table.schema, "ab")
        if found is not None and not found.equals(table):
            wrong.append(bit)
    assert wrong == []


def test_no_flipped_bit_of_what_a_table_says_goes_unseen(tmp_path):
    path, table = tmp_path / "samples.parquet", TABLE.select(["id"])
    more = {b"lrpx.notes": '{"counts": {"read": 1234}}'}
    write_table(path, table, "ab", more)
    whole = path.read_bytes()
    kept = read_table(path, table.schema, "ab")
    assert kept.schema.metadata[b"lrpx.notes"] == more[b"lrpx.notes"].encode()
    for bit in range(8 * (len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")), 8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        found = read_table(path, table.schema, "ab")
        assert found is None or (found.equals(kept) and found.schema.metadata == kept.schema.metadata), bit


def test_no_flipped_bit_of_the_record_goes_unseen(folder):
    """What a run notes beside its settings is in reports: how many samples there were, how methods are called."""
    with begin(folder) as store:
        store.note(counts={"read": 1234}, labels={"lrp": "CP-LRP"})
    path = folder / "run.json"
    whole, kept = path.read_bytes(), Store.read(folder).record
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        try:
            assert Store.read(folder).record == kept, bit
        except ResultFileError:
            continue


def flipped(content, bit):
    """The same bytes but for one bit."""
    broken = bytearray(content)
    broken[bit // 8] ^= 1 << bit % 8
    return bytes(broken)


@pytest.mark.parametrize("length", [0, 10, 100, -100, -1])
def test_a_part_cut_short_is_none(folder, length):
    path = folder / "rows" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:length])
    with begin(folder) as store:
        assert store.part("00000", COLUMNS) is None


def test_what_is_half_written_goes(folder):
    for path in (folder / ".run.json.9.tmp", folder / "rows" / ".part-00001.parquet.9.tmp"):
        path.write_bytes(b"half a file")
    with begin(folder) as store:
        store.remove_all_but(["00000"])
    assert sorted(path.name for path in folder.rglob("*")) == [".lock", "part-00000.parquet", "rows", "run.json"]


def test_parts_of_other_names_go(folder):
    with begin(folder) as store:
        store.keep("00001", TABLE)
        store.remove_all_but(["00001"])
        assert store.parts() == [store.path("00001")]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match=r"cannot write in .*file.*name another folder"), begin(tmp_path / "file"):
        pass


# ------------------------------------------------------------------------------ one at a time


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    with begin(tmp_path), pytest.raises(ResultFileError, match=r"another run is writing in .* wait until it ends"):
        begin(tmp_path).__enter__()
    with begin(tmp_path):
        pass


def test_an_error_in_a_run_ends_its_lock(tmp_path):
    with pytest.raises(KeyboardInterrupt), begin(tmp_path):
        raise KeyboardInterrupt
    with begin(tmp_path):
        pass


def test_a_killed_process_leaves_the_folder_usable(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ResultFileError, match="another run is writing"), begin(tmp_path, {"a": 1}):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with begin(tmp_path, {"a": 1}) as store:
            assert store.settings == {"a": 1}
    finally:
        holder.kill()
        holder.communicate()


def test_a_run_that_writes_nothing_leaves_no_folder(tmp_path):
    """What was there before stays, and so does what was written."""
    for existing in (tmp_path / "deep" / "er", tmp_path):
        with pytest.raises(DataError, match="nothing"), Store.begin(existing, "kind", {}, {}):
            raise DataError("nothing")
        assert not (tmp_path / "deep").exists()
        assert not (tmp_path / "rows").exists()


def test_a_run_that_wrote_its_record_keeps_it(tmp_path):
    def fails():
        with Store.begin(tmp_path / "deep", "kind", {}, {}) as store:
            store.note()
            raise DataError("after the record")

    with pytest.raises(DataError):
        fails()
    assert (tmp_path / "deep" / "run.json").is_file()
