"""nvJPEG's batches, against a stand-in for nvJPEG and the CUDA driver: all that a machine without a GPU can prove."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hatch_build
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import LaneError, MissingExtraError
from penstock.kernels import cuda
from penstock.kernels import engine as engine_module
from penstock.kernels.decoder import Decoder, TinyBatch
from penstock.kernels.engine import Backend, Engine, find, load
from penstock.kernels.table import COLUMNS, Column, Kind

SOURCES = Path(__file__).parent / "stand_in"
GUARD = 0xEE


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = hatch_build.compiler()
    if command is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("stand_in") / "libstandin.so"
    sources = sorted(str(source) for source in SOURCES.glob("*.c"))
    subprocess.run(
        [*command, "-std=gnu11", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), *sources], check=True
    )
    return path


class StandIn:
    """What the test tells the stand-in, and sees of it."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.stand_in_notes.restype = self.lib.stand_in_breaches.restype = ctypes.c_char_p

    def notes(self) -> list[str]:
        """The calls since this was last asked."""
        notes: str = self.lib.stand_in_notes().decode()
        self.lib.stand_in_forget()
        return notes.splitlines()

    def ask(self, function: str, error: int) -> None:
        """The function's next call fails."""
        self.lib.stand_in_ask(function.encode(), error)

    def finish(self) -> None:
        """The GPU is done with all."""
        self.lib.stand_in_finish()


@pytest.fixture
def gpu(library: Path) -> Iterator[StandIn]:
    stand_in = StandIn(library)
    cuda.load(str(library))
    load(str(library))
    stand_in.lib.stand_in_engines(1)
    stand_in.notes()
    with cuda.device(0):
        yield stand_in
    assert stand_in.lib.stand_in_breaches() == b""
    assert stand_in.lib.stand_in_device() == -1


@pytest.fixture
def engine(gpu: StandIn) -> Iterator[Engine]:
    with Engine(0) as engine:
        yield engine
        counts = engine.counts()
        assert (counts.device_bytes, counts.pinned_bytes) == (0, 0), "a test closes its decoders"


Image = tuple[int, int, int, int, int]
"""Width, height, subsampling across and down, level; level 0 is gray."""


def encoded(image: Image, start: bytes = b"JP", end: bytes = b".") -> bytes:
    width, height, sub_x, sub_y, level = image
    head = width.to_bytes(2, "little") + height.to_bytes(2, "little") + bytes((sub_x, sub_y, 3 if level else 1, level))
    return start + head + bytes(level) + end


class Staged:
    """A tiny-batch with its memory: rows with gaps between all that they name, which must stay as they are."""

    def __init__(self, images: list[Image], pieces: list[bytes] | None = None) -> None:
        pieces = pieces or [encoded(image) for image in images]
        self.images = images
        self.table = np.zeros((len(images), COLUMNS), np.int32)
        data, at = bytearray(b"?"), 5
        for row, (width, height, sub_x, sub_y, level), piece in zip(self.table, images, pieces, strict=True):
            row[[Column.DATA, Column.LENGTH]] = len(data), len(piece)
            row[Column.KIND] = Kind.YCC if level else Kind.GRAY
            row[[Column.WIDTH, Column.HEIGHT, Column.SUB_X, Column.SUB_Y]] = width, height, sub_x, sub_y
            row[[Column.PITCH0, Column.PITCH1]] = width + 3, -(-width // sub_x) + 1
            data += piece + b"?!"
            for plane in range(3 if level else 1):
                row[Column.PLANE0 + plane] = at
                at += 7 + self._pitch(row, plane) * self._size(row, plane)[1]
        self.data = np.frombuffer(bytes(data), np.uint8)
        self.area = np.full(at, GUARD, np.uint8)

    @staticmethod
    def _pitch(row: NDArray[np.int32], plane: int) -> int:
        return int(row[Column.PITCH1 if plane else Column.PITCH0])

    @staticmethod
    def _size(row: NDArray[np.int32], plane: int) -> tuple[int, int]:
        width, height = int(row[Column.WIDTH]), int(row[Column.HEIGHT])
        return (-(-width // int(row[Column.SUB_X])), -(-height // int(row[Column.SUB_Y]))) if plane else (width, height)

    def tiny(self, after: cuda.Event | None = None) -> TinyBatch:
        return TinyBatch(
            self, self.table.ctypes.data, len(self.table), self.data.ctypes.data, self.data.size,
            self.area.ctypes.data, self.area.size, after,
        )  # fmt: skip

    def expected(self, without: frozenset[int] = frozenset()) -> NDArray[np.uint8]:
        """The area as it must be afterwards."""
        area = np.full_like(self.area, GUARD)
        for index, (row, image) in enumerate(zip(self.table, self.images, strict=True)):
            for plane in range(0 if index in without else 3 if image[4] else 1):
                (width, height), start, pitch = (
                    self._size(row, plane),
                    row[Column.PLANE0 + plane],
                    self._pitch(row, plane),
                )
                for y in range(height):
                    area[start + y * pitch : start + y * pitch + width] = image[4] + plane
        return area


MIXED: list[Image] = [(17, 9, 2, 2, 40), (8, 8, 1, 1, 0), (5, 31, 2, 1, 90), (30, 3, 1, 2, 120), (1, 1, 2, 2, 200)]


def decode(decoder: Decoder, staged: Staged, stream: cuda.Stream) -> dict[int, str]:
    failed = decoder.submit(staged.tiny(), stream)
    stream.synchronize()
    (decoded,) = decoder.drain()
    assert decoded.tiny.key is staged
    assert decoded.failed == failed
    return failed


def calls(notes: list[str], function: str) -> list[int]:
    """How many images each call of nvJPEG's function was for."""
    return [int(re.split("[ ,]", note)[1]) for note in notes if note.startswith(function)]


@pytest.mark.parametrize("grain", [1, 2, 5, 16])
def test_planes_lie_where_the_table_says_and_nothing_else_is_touched(engine: Engine, gpu: StandIn, grain: int) -> None:
    staged = Staged(MIXED)
    with Decoder(engine, grain=grain) as decoder:
        gpu.notes()
        assert decode(decoder, staged, cuda.Stream()) == {}
        assert calls(gpu.notes(), "decode") == [min(grain, 5 - i) for i in range(0, 5, grain)]
    assert np.array_equal(staged.area, staged.expected())


@pytest.mark.parametrize("grain", [2, 5])
@pytest.mark.parametrize("bad", [{0}, {4}, {1, 2}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize(
    ("start", "end", "reason"), [(b"XX", b".", "corrupt"), (b"PN", b".", "not support"), (b"JP", b"", "incomplete")]
)
def test_a_bad_image_fails_alone(
    engine: Engine, grain: int, bad: set[int], start: bytes, end: bytes, reason: str
) -> None:
    pieces = [encoded(image, start, end) if i in bad else encoded(image) for i, image in enumerate(MIXED)]
    staged = Staged(MIXED, pieces)
    with Decoder(engine, grain=grain, states=2) as decoder:
        failed = decode(decoder, staged, cuda.Stream())
        assert failed.keys() == bad
        assert all(reason in why for why in failed.values())
        assert np.array_equal(staged.area, staged.expected(frozenset(bad)))
        after = Staged(MIXED)
        assert decode(decoder, after, cuda.Stream()) == {}
    assert np.array_equal(after.area, after.expected())


def test_one_bad_image_costs_few_calls(engine: Engine, gpu: StandIn) -> None:
    images: list[Image] = [(4, 4, 1, 1, 9)] * 64
    staged = Staged(images, [encoded(image, b"XX" if i == 37 else b"JP") for i, image in enumerate(images)])
    with Decoder(engine, grain=16) as decoder:
        gpu.notes()
        assert decode(decoder, staged, cuda.Stream()).keys() == {37}
        assert sorted(calls(gpu.notes(), "decode")) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Column.DATA, -1), (Column.LENGTH, 3), (Column.LENGTH, 10**6), (Column.KIND, Kind.RGB), (Column.KIND, 7),
        (Column.WIDTH, 0), (Column.WIDTH, 30), (Column.HEIGHT, 10**6), (Column.SUB_X, 0), (Column.PLANE1, -1),
        (Column.PLANE2, 10**6), (Column.PITCH0, 16), (Column.PITCH1, 2), (Column.PITCH1, 2**31 - 1),
    ],
)  # fmt: skip
def test_rows_that_lead_astray_reach_no_decoder(engine: Engine, column: Column, value: int) -> None:
    images: list[Image] = [(17, 9, 2, 2, 40)] * 3
    staged = Staged(images)
    expected = staged.expected(frozenset({1}))
    staged.table[1, column] = value
    with Decoder(engine) as decoder:
        failed = decode(decoder, staged, cuda.Stream())
    assert failed.keys() == {1}
    assert "outside" in failed[1]
    assert np.array_equal(staged.area, expected)


def test_a_table_may_be_senseless_from_end_to_end(engine: Engine, gpu: StandIn) -> None:
    staged = Staged(MIXED)
    staged.table[:] = -1
    with Decoder(engine) as decoder:
        gpu.notes()
        assert decode(decoder, staged, cuda.Stream()).keys() == set(range(5))
        assert calls(gpu.notes(), "decode") == []


def test_memory_is_taken_once(engine: Engine) -> None:
    with Decoder(engine, states=2, width=64, height=64) as decoder:
        stream, before = cuda.Stream(), engine.counts()
        for _ in range(1000):
            assert decode(decoder, Staged(MIXED), stream) == {}
        assert engine.counts() == before
        assert (before.allocations, before.frees) == (4, 0)
        assert before.device_bytes == before.most_device_bytes == 2 * 64 * 64
        assert decode(decoder, Staged([(200, 100, 1, 1, 5)]), stream) == {}
        grown = engine.counts()
    assert (grown.allocations, grown.frees) == (5, 1)
    assert grown.most_device_bytes == grown.device_bytes == 64 * 64 + 200 * 100


def test_nvjpeg_takes_no_more_than_it_may(gpu: StandIn) -> None:
    with Engine(0, memory_bytes=10_000) as engine, Decoder(engine, states=1, width=50, height=50) as decoder:
        staged = Staged([(150, 100, 1, 1, 5), (9, 9, 1, 1, 7)])
        failed = decode(decoder, staged, cuda.Stream())
        assert failed == {0: "nvJPEG's memory does not suffice"}
        assert np.array_equal(staged.area, staged.expected(frozenset({0})))
        assert engine.counts().most_device_bytes <= 10_000


def test_the_host_waits_before_the_area_is_written(engine: Engine, gpu: StandIn) -> None:
    stream, free = cuda.Stream(), cuda.Event()
    name = next(note.split()[1][:-1] for note in reversed(gpu.notes()) if note.startswith("event"))
    with Decoder(engine) as decoder:
        gpu.notes()
        decoder.submit(Staged(MIXED).tiny(after=free), stream)
        notes = gpu.notes()
    assert notes.index(f"wait for {name}") < next(i for i, note in enumerate(notes) if note.startswith("decode"))


def test_the_streams_next_work_is_ordered_behind_the_planes(engine: Engine, gpu: StandIn) -> None:
    stream = cuda.Stream()
    number = next(note.split()[1][:-1] for note in reversed(gpu.notes()) if note.startswith("stream"))
    with Decoder(engine) as decoder:
        decoder.submit(Staged(MIXED).tiny(), stream)
        notes = gpu.notes()
        assert f"decode 5 on {number}" in notes
        assert notes[-1].endswith(f"on {number}")
        assert notes[-1].startswith("record")


def test_what_is_in_flight_is_neither_drained_nor_waited_for(engine: Engine, gpu: StandIn) -> None:
    stream, first, second = cuda.Stream(), Staged(MIXED), Staged(MIXED[:2])
    with Decoder(engine, grain=2, states=4) as decoder:
        decoder.submit(first.tiny(), stream)
        decoder.submit(second.tiny(), stream)
        assert decoder.drain() == []
        gpu.finish()
        assert [decoded.tiny.key for decoded in decoder.drain()] == [first, second]
        assert decoder.drain() == []


def test_with_all_states_in_flight_the_oldest_is_waited_for(engine: Engine) -> None:
    """The stand-in notes a breach, which fails the test, where a state is used that is not done."""
    stream, staged = cuda.Stream(), [Staged(MIXED[: 1 + i % 5]) for i in range(7)]
    with Decoder(engine, states=3) as decoder:
        for tiny in staged:
            decoder.submit(tiny.tiny(), stream)
        assert [decoded.tiny.key for decoded in decoder.drain()] == staged[:4]
    assert all(np.array_equal(tiny.area, tiny.expected()) for tiny in staged)


@pytest.mark.parametrize("handles", [None, 3, 2, 1])
def test_states_may_share_handles(gpu: StandIn, handles: int | None) -> None:
    with Engine(0) as engine, Decoder(engine, grain=1, states=3, handles=handles) as decoder:
        assert decode(decoder, Staged(MIXED), cuda.Stream()) == {}
    notes = gpu.notes()
    assert len(calls(notes, "preallocate")) == 3
    assert sum(note.startswith("create") for note in notes) == notes.count("destroy") == 1 + (handles or 3)


def test_states_are_initialised_anew_only_for_another_number_of_images(engine: Engine, gpu: StandIn) -> None:
    stream = cuda.Stream()
    with Decoder(engine, states=1) as decoder:
        gpu.notes()
        for n in (5, 5, 5, 3, 3, 5):
            decode(decoder, Staged(MIXED[:n]), stream)
        assert calls(gpu.notes(), "initialise") == [5, 3, 5]


def test_a_tiny_batch_without_rows_is_refused(engine: Engine) -> None:
    stream, staged = cuda.Stream(), Staged(MIXED)
    with Decoder(engine) as decoder:
        with pytest.raises(ValueError, match="at least one row"):
            decoder.submit(replace(staged.tiny(), rows=0), stream)
        with pytest.raises(ValueError, match="no less than no memory"):
            decoder.submit(replace(staged.tiny(), area_bytes=-1), stream)
        assert decode(decoder, staged, stream) == {}


@pytest.mark.parametrize("status", [1, 6, 7])
def test_when_nvjpeg_itself_fails_no_image_is_blamed(engine: Engine, gpu: StandIn, status: int) -> None:
    with Decoder(engine) as decoder:
        gpu.notes()
        gpu.ask("nvjpegDecodeBatched", status)
        assert decode(decoder, Staged(MIXED), cuda.Stream()).keys() == set(range(5))
        assert calls(gpu.notes(), "decode") == [5]
        assert decode(decoder, Staged(MIXED), cuda.Stream()) == {}


@pytest.mark.parametrize("function", ["cuEventSynchronize", "cuEventRecord"])
def test_when_the_driver_fails_the_error_says_so(engine: Engine, gpu: StandIn, function: str) -> None:
    stream = cuda.Stream()
    with Decoder(engine) as decoder:
        gpu.ask(function, 719)
        with pytest.raises(LaneError, match=r"something else.*CUDA error 719"):
            decoder.submit(Staged(MIXED).tiny(), stream)
        gpu.finish()


def test_a_gpu_that_fails_later_is_noticed_when_drained(engine: Engine, gpu: StandIn) -> None:
    with Decoder(engine) as decoder:
        decoder.submit(Staged(MIXED).tiny(), cuda.Stream())
        gpu.ask("cuEventQuery", 719)
        with pytest.raises(LaneError, match=r"while it decoded.*719"):
            decoder.drain()


@pytest.mark.parametrize("function", ["nvjpegJpegStateCreate", "nvjpegCreateExV2", "cuEventCreate", "cuMemAlloc_v2"])
def test_a_decoder_that_cannot_be_made_leaves_nothing(engine: Engine, gpu: StandIn, function: str) -> None:
    gpu.ask(function, 2)
    with pytest.raises(LaneError, match="no decoder of 4 states for 16 images of 1024 x 1024"):
        Decoder(engine)


@pytest.mark.parametrize("options", [{"grain": 0}, {"states": 0}, {"handles": 0}, {"handles": 5}, {"width": 0}])
def test_senseless_sizes_of_a_decoder_are_refused(engine: Engine, options: dict[str, int]) -> None:
    with pytest.raises(LaneError, match="senseless sizes"):
        Decoder(engine, **options)


# ---- the engine


def test_without_a_jpeg_engine_the_processors_decode(gpu: StandIn) -> None:
    with Engine(0) as engine:
        assert engine.backend == Backend.ENGINE
        assert engine.counts()[5:] == (13, 1, 2, 1, 8)
    gpu.lib.stand_in_engines(0)
    with Engine(0, flags=5) as engine:
        assert engine.backend == Backend.PROCESSORS
        assert engine.counts()[8:] == (0, 0)
        with Decoder(engine) as decoder:
            assert decode(decoder, Staged(MIXED), cuda.Stream()) == {}
    assert "create backend 2, flags 5" in gpu.notes()
    with pytest.raises(LaneError, match="GPU 0: it has no JPEG engine"):
        Engine(0, Backend.ENGINE)


def test_an_engine_that_cannot_be_had_lets_go_of_the_gpu(gpu: StandIn) -> None:
    with pytest.raises(LaneError, match=r"GPU 7.*invalid device ordinal.*CUDA_ERROR_INVALID_DEVICE, CUDA error 101"):
        Engine(7)
    gpu.ask("nvjpegCreateExV2", 8)
    with pytest.raises(LaneError, match="nvjpegCreateExV2 failed with nvJPEG's status 8"):
        Engine(1)
    assert gpu.notes()[-1] == "release 1: 0"


def test_nvjpeg_is_asked_what_it_supports(engine: Engine) -> None:
    assert engine.supports(encoded(MIXED[0]))
    assert not engine.supports(b"GIF89a")
    assert not engine.supports(b"JP" + bytes((4, 0, 4, 0, 1, 1, 4, 0)))


# ---- the driver


def test_a_thread_uses_a_device_and_becomes_what_it_was(library: Path) -> None:
    gpu = StandIn(library)
    cuda.load(str(library))
    assert (gpu.lib.stand_in_device(), gpu.lib.stand_in_mode()) == (-1, 0)
    with cuda.device(1):
        assert (gpu.lib.stand_in_device(), gpu.lib.stand_in_mode()) == (1, 2), "relaxed: graph captures go on"
        with cuda.device(0):
            assert gpu.lib.stand_in_device() == 0
        assert (gpu.lib.stand_in_device(), gpu.lib.stand_in_mode()) == (1, 2)
    assert (gpu.lib.stand_in_device(), gpu.lib.stand_in_mode()) == (-1, 0)
    assert gpu.notes()[-1] == "release 1: 0"
    with pytest.raises(LaneError, match="GPU 2 cannot be used: invalid device ordinal"), cuda.device(2):
        pass


def test_events_order_streams_and_tell_when_all_is_done(gpu: StandIn, engine: Engine) -> None:
    stream, other, event = cuda.Stream(priority=-1), cuda.Stream(), cuda.Event()
    assert [note.split(": ")[1] for note in gpu.notes()[-3:]] == [
        "flags 1, priority -1",
        "flags 1, priority 0",
        "flags 3",
    ]
    assert event.done()
    with Decoder(engine) as decoder:
        decoder.submit(Staged(MIXED).tiny(), stream)
        event.record(stream)
        other.wait(event)
        assert "waits for event" in gpu.notes()[-1]
        assert not event.done()
        event.synchronize()
        assert event.done()
    for one in (event, stream, other):
        one.close()


def test_memory_is_copied_filled_and_pinned(gpu: StandIn) -> None:
    stream, here, there = cuda.Stream(), np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    cuda.copy(there.ctypes.data, here.ctypes.data, 60, stream)
    assert np.array_equal(there[:60], here[:60])
    assert not there[60:].any()
    cuda.fill(there.ctypes.data, 0xA1B2C3D4, 5, stream)
    assert there[:20].tobytes() == bytes.fromhex("d4c3b2a1") * 5
    cuda.register(here.ctypes.data, 100)
    cuda.unregister(here.ctypes.data)
    assert gpu.notes()[-2:] == ["register 100, flags 1", "unregister"]
    gpu.ask("cuMemHostRegister_v2", 1)
    with pytest.raises(LaneError, match="100 bytes cannot be pinned"):
        cuda.register(here.ctypes.data, 100)


# ---- the libraries


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(LaneError, match=r"needs an NVIDIA GPU.*/no/libcuda\.so.*cannot be used"):
        cuda.load("/no/libcuda.so")
    with pytest.raises(LaneError, match=r"libm\.so\.6 has no function cuInit"):
        cuda.load("libm.so.6")


def test_a_driver_that_does_not_start_is_named(library: Path) -> None:
    StandIn(library).ask("cuInit", 100)
    with pytest.raises(LaneError, match="the driver does not start: something else"):
        cuda.load(str(library))


def test_a_library_that_is_no_nvjpeg_is_named() -> None:
    with pytest.raises(LaneError, match=r"libm\.so\.6 has no function nvjpeg.*penstock\[cuda\]"):
        load("libm.so.6")


def test_before_the_driver_is_loaded_nothing_can_be_had() -> None:
    code = """
import pytest
from penstock.errors import LaneError
from penstock.kernels import cuda, engine
for have in (cuda.Event, cuda.Stream, lambda: cuda.device(0).__enter__(), lambda: cuda.register(0, 1)):
    with pytest.raises(LaneError, match="CUDA error 3"):
        have()
with pytest.raises(LaneError, match="not loaded"):
    engine.Engine(0)
assert cuda.version() == (0, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def touch(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(path)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which Python's packages are looked for, and nowhere else."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(engine_module.glob, "glob", lambda pattern: [])
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("newest", "remedy"), [(13, r"penstock\[cuda\].*nvidia-nvjpeg"), (12, "nvidia-nvjpeg-cu12"), (14, r"so\.14")]
)
def test_without_nvjpeg_the_error_names_what_brings_it(places: Path, newest: int, remedy: str) -> None:
    with pytest.raises(MissingExtraError, match=remedy):
        find(newest)


def test_the_newest_nvjpeg_that_the_driver_runs_is_found(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = touch(places / "nvidia/nvjpeg/lib/libnvjpeg.so.12")
    new = touch(places / "nvidia/cu13/lib/libnvjpeg.so.13")
    assert (find(12), find(13), find(14)) == (old, new, new)
    touch(places / "cuda/lib64/libnvjpeg.so.13")
    monkeypatch.setenv("CUDA_HOME", str(places / "cuda"))
    assert find(13) == new, "Python's packages come first: they fit torch"
    Path(new).unlink()
    assert find(13) == str(places / "cuda/lib64/libnvjpeg.so.13")
