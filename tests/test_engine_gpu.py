"""nvJPEG itself, on a GPU: what native/decoder.c takes for granted, and what facts.py claims."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import jpegs
from penstock.kernels import cuda
from penstock.kernels.decoder import Decoder, TinyBatch
from penstock.kernels.engine import Backend, Engine, load
from penstock.kernels.facts import Facts, examine
from penstock.kernels.table import COLUMNS, Column, Kind

pytestmark = pytest.mark.gpu

UNTOUCHED = 0x4D


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.zeros(1, device="cuda")
    cuda.load()
    load()
    with cuda.device(0), Engine(0) as engine:
        yield engine


def photos(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(33, 500, (count, 2))
    return [
        jpegs.saved(jpegs.photo(int(w), int(h), i, "L"))
        if i % 9 == 8
        else jpegs.saved(jpegs.photo(int(w), int(h), i), subsampling=i % 3)
        for i, (w, h) in enumerate(sizes)
    ]


class Staged:
    """Files in pinned memory, a table that names them, an area for their planes."""

    def __init__(self, files: Sequence[bytes], facts: Sequence[Facts] | None = None) -> None:
        facts = facts or [examine(file) for file in files]
        self.files = files
        self.data = torch.zeros(sum(map(len, files)), dtype=torch.uint8).pin_memory()
        self.data.numpy()[:] = np.frombuffer(b"".join(files), np.uint8)
        self.table = np.zeros((len(files), COLUMNS), np.int32)
        start = at = 0
        for row, file, fact in zip(self.table, files, facts, strict=True):
            row[[Column.DATA, Column.LENGTH, Column.KIND]] = start, len(file), fact.kind
            row[[Column.WIDTH, Column.HEIGHT]] = fact.width, fact.height
            row[[Column.SUB_X, Column.SUB_Y]] = max(1, fact.sub_x), max(1, fact.sub_y)
            row[[Column.PITCH0, Column.PITCH1]] = -(-fact.width // 64) * 64, -(-fact.width // 64) * 64
            for plane in range(3 if fact.kind is Kind.YCC else 1):
                row[Column.PLANE0 + plane] = at
                at += int(row[Column.PITCH0]) * fact.height
            start += len(file)
        self.area = torch.full((at,), UNTOUCHED, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def tiny(self, after: cuda.Event | None = None) -> TinyBatch:
        return TinyBatch(
            self, self.table.ctypes.data, len(self.table), self.data.data_ptr(), len(self.data),
            self.area.data_ptr(), len(self.area), after,
        )  # fmt: skip

    def luma(self, index: int, area: torch.Tensor | None = None) -> NDArray[np.uint8]:
        row = self.table[index]
        start, pitch, height = int(row[Column.PLANE0]), int(row[Column.PITCH0]), int(row[Column.HEIGHT])
        plane = (self.area if area is None else area)[start : start + pitch * height].view(height, pitch)
        return np.asarray(plane[:, : int(row[Column.WIDTH])].cpu().numpy(), np.uint8)

    def apart(self, index: int) -> int:
        """Levels between the planes and libjpeg's, at most."""
        with Image.open(io.BytesIO(self.files[index])) as image:
            image.draft("L", None)
            return int(np.abs(self.luma(index).astype(int) - np.asarray(image.convert("L"))).max())

    def right(self, index: int, area: torch.Tensor | None = None) -> bool:
        with Image.open(io.BytesIO(self.files[index])) as image:
            image.draft("L", None)
            return np.array_equal(self.luma(index, area), np.asarray(image.convert("L")))


@pytest.mark.parametrize("grain", [1, 16, 50])
def test_planes_are_libjpegs(engine: Engine, grain: int) -> None:
    staged, stream = Staged(photos(50)), cuda.Stream()
    with Decoder(engine, grain=grain) as decoder:
        assert decoder.submit(staged.tiny(), stream) == {}
        stream.synchronize()
        assert [decoded.tiny.key for decoded in decoder.drain()] == [staged]
    assert all(staged.right(i) for i in range(50))


def test_the_processors_decode_for_gpus_without_an_engine(engine: Engine) -> None:
    """Their transform rounds as it likes, by a level or two."""
    staged, stream = Staged(photos(50)), cuda.Stream()
    with Engine(0, Backend.PROCESSORS) as processors, Decoder(processors) as decoder:
        for _ in range(3):
            assert decoder.submit(staged.tiny(), stream) == {}
        stream.synchronize()
        apart = [staged.apart(index) for index in range(50)]
        print(f"processors: at most {max(apart)} levels from libjpeg's, {apart.count(0)} of 50 images equal")
    assert max(apart) <= 2


def test_the_streams_next_work_finds_the_planes(engine: Engine) -> None:
    staged, stream = Staged(photos(40)), cuda.Stream()
    follower = torch.cuda.ExternalStream(stream.handle)
    with Decoder(engine) as decoder:
        for _ in range(20):
            staged.area.fill_(UNTOUCHED)
            torch.cuda.synchronize()
            decoder.submit(staged.tiny(), stream)
            with torch.cuda.stream(follower):
                copy = staged.area.clone()
            stream.synchronize()
            assert all(staged.right(i, copy) for i in range(40))


def test_the_area_is_left_alone_until_it_is_free(engine: Engine) -> None:
    staged, stream, free = Staged(photos(16)), cuda.Stream(), cuda.Event()
    busy = torch.cuda.ExternalStream(stream.handle)
    with Decoder(engine) as decoder, torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)
        copy = staged.area.clone()
        free.record(stream)
        decoder.submit(staged.tiny(after=free), stream)
        stream.synchronize()
    assert bool((copy == UNTOUCHED).all())


def test_what_is_taken_is_supported_and_right(engine: Engine) -> None:
    samplings = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
    files = {name: jpegs.saved(jpegs.photo(75, 61), subsampling=number) for name, number in samplings.items()}
    files["gray"] = jpegs.saved(jpegs.photo(75, 61, 0, "L"))
    for size in ((1, 1), (9, 5), (8, 8), (17, 33), (63, 65), (4000, 3000), (9000, 40)):
        files[f"{size}"] = jpegs.saved(jpegs.photo(*size))
    for options in ({"quality": 100}, {"optimize": True}, {"restart_marker_blocks": 4}, {"quality": 3}):
        files[f"{options}"] = jpegs.saved(jpegs.photo(300, 200), **options)
    taken = {name: file for name, file in files.items() if examine(file).refusal is None}
    assert [name for name, file in taken.items() if not engine.supports(file)] == []
    staged, stream = Staged(list(taken.values())), cuda.Stream()
    with Decoder(engine, width=4096, height=4096) as decoder:
        failed = decoder.submit(staged.tiny(), stream)
        stream.synchronize()
    wrong = [name for i, name in enumerate(taken) if i in failed or not staged.right(i)]
    assert wrong == []


@pytest.mark.parametrize("damage", ["no header", "no frame"])
def test_a_bad_image_fails_alone(engine: Engine, damage: str) -> None:
    files = photos(20)
    facts = [examine(file) for file in files]
    files[7] = {
        "no header": bytes(2000),
        "no frame": files[7].replace(b"\xff\xc0", b"\xff\xcf", 1),
    }[damage]
    staged, stream = Staged(files, facts), cuda.Stream()
    with Decoder(engine) as decoder:
        failed = decoder.submit(staged.tiny(), stream)
        stream.synchronize()
        assert failed.keys() == {7}
        assert all(staged.right(i) for i in range(20) if i != 7)
        assert decoder.submit(Staged(photos(20)).tiny(), stream) == {}


def test_memory_is_taken_once(engine: Engine) -> None:
    staged, stream = [Staged(photos(48, seed)) for seed in range(10)], cuda.Stream()
    with Decoder(engine, width=512, height=512) as decoder:
        for one in staged:
            decoder.submit(one.tiny(), stream)
        before = engine.counts()
        for i in range(1000):
            assert decoder.submit(staged[i % 10].tiny(), stream) == {}
        stream.synchronize()
        assert len(decoder.drain()) == 1010
        assert engine.counts() == before


def test_another_threads_graph_capture_goes_on(engine: Engine) -> None:
    staged, inside, enough = Staged(photos(16)), threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def decode() -> None:
        try:
            with cuda.device(0), Decoder(engine) as decoder:
                stream = cuda.Stream()
                inside.wait()
                for _ in range(10):
                    assert decoder.submit(staged.tiny(), stream) == {}
                    stream.synchronize()
        except BaseException as problem:
            problems.append(problem)
        enough.set()

    thread = threading.Thread(target=decode)
    thread.start()
    x, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        inside.set()
        enough.wait()
        y = y + 1
    thread.join()
    assert problems == []
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 3).all())
    assert all(staged.right(i) for i in range(16))
