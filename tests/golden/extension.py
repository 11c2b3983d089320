"""Golden traces as syrupy snapshots: the same files and the same comparer as `pith verify`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from golden.cases import LAYOUT_STEPS
from golden.compare import Difference, compare
from golden.trace import FOLDER, Golden, Trace, from_text, to_text

UPDATE = 'traces are written by: pith verify --update --reason "..."'


class TraceExtension(SingleFileSnapshotExtension):
    """snapshot(name="base") is golden/base.json. All steps are compared."""

    _write_mode = WriteMode.TEXT
    file_extension = "json"
    num_steps: int | None = None

    def serialize(self, data: Trace, **options: Any) -> str:
        return to_text(Golden(data, {"": data.costs}, {}, ()))

    @classmethod
    def differences(cls, serialized: str, snapshot: str) -> tuple[Difference, ...]:
        golden, got = from_text(snapshot, "snapshot").trace, from_text(serialized, "test").trace
        if golden.fingerprint != got.fingerprint:
            return (Difference(-1, "fingerprint", golden.fingerprint, got.fingerprint),)
        return compare(golden, got, cls.num_steps).differences

    def matches(self, *, serialized_data: str, snapshot_data: str) -> bool:
        return not self.differences(serialized_data, snapshot_data)

    def diff_lines(self, serialized_data: str, snapshot_data: str) -> Iterator[str]:
        """One readable line for each figure that differs, the first of them first."""
        yield from map(str, self.differences(serialized_data, snapshot_data))

    @classmethod
    def get_snapshot_name(cls, *, test_location: Any, index: Any = 0) -> str:
        return str(index)

    @classmethod
    def dirname(cls, *, test_location: Any) -> str:
        return str(FOLDER)

    @classmethod
    def matches_test_location(cls, *, test_location: Any, snapshot_location: str) -> bool:
        """A trace belongs to whichever test names it."""
        return Path(snapshot_location).parent == FOLDER

    def discover_snapshots(self, *, test_location: Any, ignore_extensions: Any = None) -> SnapshotCollections:
        """Every trace, and nothing else that lies beside it."""
        discovered = SnapshotCollections()
        for path in sorted(FOLDER.glob("*.json")):
            discovered.add(self.read_snapshot_collection(snapshot_location=str(path)))
        return discovered

    @classmethod
    def write_snapshot_collection(cls, **options: Any) -> None:
        raise RuntimeError(UPDATE)

    def delete_snapshots(self, **options: Any) -> None:
        raise RuntimeError(UPDATE)


class FirstStepsExtension(TraceExtension):
    """The first steps only: what a layout is compared with."""

    num_steps = LAYOUT_STEPS
