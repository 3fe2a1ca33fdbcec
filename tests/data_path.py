"""A small simulation of loaders, event by event, which `penstock.cost` is compared with."""

from __future__ import annotations

import heapq
import random
from collections import deque

__all__ = ["alternating", "buffered", "reading"]


def draw(rng: random.Random, mean: float, uneven: float) -> float:
    """A gamma-distributed time; `uneven` is its standard deviation over its mean."""
    return rng.gammavariate(uneven**-2, mean * uneven**2) if uneven else mean


class Place:
    """Somewhere that serves a few at once, in the order of arrival."""

    def __init__(self, servers: int, mean_s: float, uneven: float) -> None:
        self.free, self.mean_s, self.uneven = servers, mean_s, uneven
        self.queue: deque[int] = deque()


def alternating(
    workers: int,
    cores: int,
    prep_s: float,
    storage_s: float,
    delay_s: float,
    uncached: float,
    uneven: tuple[float, float],
    samples: int = 12000,
) -> float:
    """Samples per second of workers that read (one at a time for `storage_s`, then a delay), then prepare on a core."""
    rng = random.Random(0)
    cpu, disk = Place(cores, prep_s, uneven[0]), Place(1, storage_s, uneven[1])
    events: list[tuple[float, int, str, int]] = []
    now = 0.0

    def arrive(place: Place, name: str, worker: int) -> None:
        if place.free:
            place.free -= 1
            heapq.heappush(events, (now + draw(rng, place.mean_s, place.uneven), rng.getrandbits(32), name, worker))
        else:
            place.queue.append(worker)

    def leave(place: Place, name: str) -> None:
        place.free += 1
        if place.queue:
            arrive(place, name, place.queue.popleft())

    def begin(worker: int) -> None:
        if rng.random() < uncached:
            arrive(disk, "disk", worker)
        else:
            arrive(cpu, "cpu", worker)

    for worker in range(workers):
        begin(worker)
    done, warm, since = 0, samples // 10, 0.0
    while done < samples:
        now, _, what, worker = heapq.heappop(events)
        if what == "cpu":
            leave(cpu, "cpu")
            done += 1
            since = now if done == warm else since
            begin(worker)
        elif what == "disk":
            leave(disk, "disk")
            heapq.heappush(events, (now + delay_s, rng.getrandbits(32), "arrived", worker))
        else:
            arrive(cpu, "cpu", worker)
    return (done - warm) / (now - since)


def reading(readers: int, storage_s: float, delay_s: float, uneven: float, samples: int = 6000) -> float:
    """What `readers` that do nothing else get out of that storage."""
    return alternating(readers, readers, 1e-12, storage_s, delay_s, 1.0, (0.0, uneven), samples)


def buffered(
    workers: int, ahead: int, batch_s: float, step_s: float, uneven: tuple[float, float], steps: int = 20000
) -> float:
    """Steps per second of a loader whose workers take batches in turn, `ahead` at most beyond the one in training.

    As in torch: worker n makes batches n, n + W, n + 2W and so on; they are delivered in order; and a batch is begun
    no sooner than the one `ahead` before it is taken.
    """
    rng = random.Random(0)
    taken: list[float] = []
    ready = [0.0] * steps
    now = 0.0
    for step in range(steps):
        allowed = taken[step - ahead] if step >= ahead else 0.0
        before = ready[step - workers] if step >= workers else 0.0
        ready[step] = max(allowed, before) + draw(rng, batch_s, uneven[0])
        now = max(now, ready[step])
        taken.append(now)
        now += draw(rng, step_s, uneven[1])
    return steps / now
