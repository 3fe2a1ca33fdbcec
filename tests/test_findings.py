"""Each thing that goes wrong in a training is found, weighed and answered; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.findings import Finding, findings
from penstock.profile import Evidence, Operator, PrepPoint, Profile, ReadPoint, Split
from profiles import profile

IDLE = Split(0.1, 0.0, 0.0, 0.0)


def fine(**changes: Any) -> Profile:
    """A training that its GPU bounds, and everything measured as it should be."""
    whole = profile(
        gpu_samples_per_s=1000.0,
        resident_samples_per_s=1000.0,
        rate_samples_per_s=990.0,
        warm_samples_per_s=990.0,
        split=Split(0.256, 0.0025, 0.0, 0.0),
        read_amplification=0.7,
        gpu_steps_s=(0.256,) * 20,
    )
    return replace(whole, **changes)


def found(whole: Profile, kind: str) -> Finding:
    matching = [finding for finding in findings(whole) if finding.kind == kind]
    assert len(matching) == 1, [finding.kind for finding in findings(whole)]
    return matching[0]


def kinds(whole: Profile) -> list[str]:
    return [finding.kind for finding in findings(whole)]


def test_a_gpu_that_is_kept_busy_is_the_only_finding() -> None:
    assert kinds(fine()) == ["gpu_bound"]
    finding = found(fine(), "gpu_bound")
    assert finding.share > 0.98
    assert (finding.remedies[0].samples_per_s or 0) > 1200


def test_waiting_for_storage_is_weighed_and_the_remedies_come_best_first() -> None:
    finding = found(profile(), "fetch_bound")
    assert finding.share == pytest.approx(0.32, abs=0.01)
    assert finding.evidence["storage_bytes_per_s"] == pytest.approx(209e6)
    rates = [remedy.samples_per_s or 0 for remedy in finding.remedies]
    assert rates == sorted(rates, reverse=True)
    assert all(rate > profile().rate_samples_per_s for rate in rates)
    assert any("GB that never evicts" in remedy.action for remedy in finding.remedies)


def test_a_remedy_that_brings_nothing_is_none() -> None:
    """A disk that is full with one reader: more workers read no more."""
    full = profile(storage=(ReadPoint(1, 1170.0, 1.2e8), ReadPoint(8, 1170.0, 1.2e8)), storage_samples_per_s=1170.0)
    full = replace(full, storage_wait_s=1e-5, watch_evidence=Evidence(1000, 1000, ""))
    actions = [remedy.action for remedy in found(full, "fetch_bound").remedies]
    assert not any("workers" in action for action in actions)
    assert "a disk twice as fast" in actions


def test_waiting_for_preparation_names_cores_and_the_costliest_operator() -> None:
    finding = found(profile(), "prep_bound")
    assert finding.share == pytest.approx(0.11, abs=0.01)
    assert any(remedy.action.startswith("10 cores instead of 8") for remedy in finding.remedies)
    assert any(remedy.action.startswith("decode is 66% of preparing") for remedy in finding.remedies)


def test_too_few_workers_for_the_cores() -> None:
    slow = fine(
        workers=2,
        prefetch_batches=4,
        prep_samples_per_s=500.0,
        prep=(PrepPoint(1, 250.0, 1.0), PrepPoint(2, 500.0, 1.0)),
        storage=(ReadPoint(1, 5000.0, 5e8),),
        storage_samples_per_s=5000.0,
        rate_samples_per_s=480.0,
        warm_samples_per_s=490.0,
        split=Split(0.256, 0.27, 0.0, 0.0),
    )
    finding = found(slow, "few_workers")
    assert finding.what == "2 workers cannot use 8 cores."
    assert (finding.remedies[0].samples_per_s or 0) > 900
    assert "workers for each rank instead of 2" in found(slow, "prep_bound").remedies[0].action


def test_no_workers_at_all() -> None:
    inline = fine(
        workers=0,
        split=Split(0.256, 0.1, 0.0, 0.0),
        rate_samples_per_s=700.0,
        warm_samples_per_s=None,
        prep=(PrepPoint(0, 2000.0, 1.0),),
    )
    finding = found(inline, "no_workers")
    assert finding.remedies[0].action == "num_workers=8"
    assert "few_workers" not in kinds(inline)


def test_workers_in_each_others_way() -> None:
    crowded = profile(
        workers=32, prep_samples_per_s=1500.0, prep=(PrepPoint(8, 2000.0, 1.0), PrepPoint(32, 1500.0, 0.75))
    )
    assert found(crowded, "idle_workers").remedies[0].action == "num_workers=8"


def test_a_page_cache_that_thrashes() -> None:
    finding = found(profile(), "thrashing")
    step_s = 256 / profile().rate_samples_per_s
    after = finding.remedies[0].samples_per_s
    assert after == pytest.approx(256 / (step_s - profile().split.thrashing_s), rel=0.01)
    assert "cache='45.0GB'" in finding.remedies[0].action


def test_read_amplification_counts_what_is_read_twice() -> None:
    finding = found(profile(read_amplification=2.0), "read_amplification")
    assert finding.share == pytest.approx(found(profile(), "fetch_bound").share / 2)
    assert "read_amplification" not in kinds(profile(read_amplification=1.04))


def test_the_interpreter_lock() -> None:
    finding = found(fine(lock_wait_s=0.05), "lock_loss")
    assert finding.share == pytest.approx(0.05 / 0.2585)
    assert "lock_loss" not in kinds(fine(lock_wait_s=0.001))
    assert "lock_loss" not in kinds(fine(lock_wait_s=None))


def test_copies_that_steps_wait_for() -> None:
    finding = found(fine(resident_samples_per_s=1200.0, copy_bytes_per_s=4e9), "slow_copies")
    assert finding.share == pytest.approx(1 / 6, abs=0.01)
    assert "pageable memory" in finding.what
    assert "pageable" not in found(fine(resident_samples_per_s=1200.0, copy_bytes_per_s=25e9), "slow_copies").what
    assert "slow_copies" not in kinds(fine(resident_samples_per_s=1005.0))


def test_caches_that_could_not_be_dropped_come_first() -> None:
    evidence = Evidence(1000, 250, "/proc/PID/io")
    whole = profile(cold=False, storage_evidence=evidence, storage_samples_per_s=None, storage=())
    first = findings(whole)[0]
    assert first.kind == "not_cold"
    assert first.weight == "invalid"
    assert "75% of the reads came from memory" in first.what
    unknown = found(profile(cold=None, storage_evidence=Evidence(1000, None, "")), "coldness_unknown")
    assert unknown.weight == "fact"


def test_data_that_was_not_in_memory_makes_p_invalid() -> None:
    whole = profile(in_memory=False, prep_evidence=Evidence(1000, 300, "/proc/PID/io"))
    assert findings(whole)[0].kind == "not_in_memory"
    assert "memory_unknown" in kinds(profile(in_memory=None))


def test_a_data_set_that_fits_into_memory() -> None:
    assert "fits_in_memory" in kinds(profile(cache_bytes=200 * 10**9))
    assert "fits_in_memory" not in kinds(profile())


def test_a_step_that_shares_its_cores_with_the_workers() -> None:
    whole = profile(
        gpu=None,
        cores=2,
        workers=2,
        gpu_samples_per_s=100.0,
        batch_samples=10,
        step_cpu_s=0.1,
        prep_samples_per_s=100.0,
        prep=(PrepPoint(2, 100.0, 1.0),),
        warm_samples_per_s=66.0,
    )
    finding = found(whole, "shared_cores")
    assert finding.share == pytest.approx(1 / 3, abs=0.02)


def test_what_the_parts_do_not_explain_is_said() -> None:
    finding = found(fine(warm_samples_per_s=700.0), "unexplained")
    assert finding.weight == "stall"
    assert finding.share == pytest.approx(0.3, abs=0.02)
    assert "unexplained" not in kinds(fine(warm_samples_per_s=960.0))
    assert found(fine(warm_samples_per_s=1500.0), "unexplained").weight == "invalid"


def test_stalls_come_worst_first_and_facts_last() -> None:
    weights = [finding.weight for finding in findings(profile(cache_bytes=200 * 10**9))]
    assert weights == sorted(weights, key=["invalid", "stall", "fact"].index)
    shares = [finding.share for finding in findings(profile()) if finding.weight == "stall"]
    assert shares == sorted(shares, reverse=True)


def test_shares_are_shares_and_figures_name_their_units() -> None:
    for whole in (profile(), fine(), profile(operators=(Operator("one", 0.0),)), profile(split=IDLE)):
        for finding in findings(whole):
            assert 0 <= finding.share <= 1
            for name in finding.evidence:
                assert name.endswith(("_s", "_bytes", "_share", "cores", "rank", "workers", "amplification", "_fewer"))
