"""What `dry_run` says that recovery needs, beside what it takes."""

from __future__ import annotations

import pytest
from composing import config
from scale.measure import CASES, SIZES, measured, overrides, told

from tc.plan import PROGRAM_BYTES, RecoveryCost, mixer_parameters, recovery_costs
from tc.teacher import read_geometry


def fits(said: int, seen: int) -> bool:
    """An estimate is good for knowing whether a run fits, no more."""
    print(f"told {said / 1e6:.0f} MB, taken {seen / 1e6:.0f} MB")
    return 0.7 < said / seen < 1.6


@pytest.mark.parametrize(
    "own",
    [
        ["sequence_length=2048", "batch_sequences=1", "lr_rest=0"],
        ["sequence_length=512", "batch_sequences=1", "lr_rest=1e-4"],
        ["sequence_length=512", "batch_sequences=8", "micro_sequences=2", "lr_rest=1e-4"],
    ],
)
def test_memory_of_recovery_is_what_it_takes(own: list[str]) -> None:
    given = overrides(SIZES, own)
    cost = told(given)
    (found,) = measured(given, 1)
    assert fits(cost.memory.total - PROGRAM_BYTES, found["peak"])
    assert not fits(cost.memory.trained // 4, found["peak"])  # a control: weights alone


@pytest.mark.slow
def test_memory_in_two_processes_is_what_each_takes() -> None:
    cost, alone = (told(overrides(SIZES, CASES["all"], world)) for world in (2, 1))
    found = measured(overrides(SIZES, CASES["all"], 2), 2)
    assert len(found) == 2

    def expected(cost: RecoveryCost) -> int:
        return max(cost.memory.total, cost.loading_bytes) - PROGRAM_BYTES

    for each in found:
        assert fits(cost.loading_bytes - PROGRAM_BYTES, each["loading"])
        assert fits(expected(cost), each["peak"])
    assert cost.memory.trained < 0.6 * alone.memory.trained


PAPER = ["teacher=qwen3_8b", "policy=every4", "recovery=paper"]


def costs(*more: str) -> dict[str, RecoveryCost]:
    run = config(*PAPER, *more)
    geometry = read_geometry(run.teacher)
    mixers = 27 * mixer_parameters(geometry, run.student.use_gate)
    return recovery_costs(run, geometry, mixers)


def test_shards_are_an_eighth_and_what_is_gathered_is_not() -> None:
    one, eight = costs(), costs("trainer=fsdp", "trainer.devices=8")
    for name in ("stage1", "stage2"):
        own, alone = eight[name].memory, one[name].memory
        assert own.trained == alone.trained // 8
        assert alone.gathered == 0 and own.gathered > 0
        assert own.activations <= alone.activations
        assert eight[name].step_flops == one[name].step_flops / 8
        assert one[name].step_traffic_bytes == 0 < eight[name].step_traffic_bytes
        # Every process makes both models whole, however many there are.
        assert eight[name].loading_bytes >= one[name].loading_bytes - PROGRAM_BYTES


def test_traffic_and_arithmetic_bound_the_tokens_of_a_second() -> None:
    cost = costs("trainer=fsdp", "trainer.devices=8")["stage2"]
    quick = cost.tokens_per_second(1e30, 1e30)
    by_flops = cost.tokens_per_second(4e14, 1e30)
    by_traffic = cost.tokens_per_second(1e30, 5e10)
    assert cost.tokens_per_second(4e14, 5e10) == min(by_flops, by_traffic) < quick
    assert by_flops == pytest.approx(cost.step_tokens / (cost.step_flops / 4e14))
    # Of 32 sequences each of 8 devices has 4, one a micro-batch: four gatherings a step.
    student = cost.memory.trained * 8 / 4
    teacher = 2 * 8190735360
    assert cost.step_traffic_bytes == pytest.approx(4 * (teacher + 3 * student) * 7 / 8, rel=1e-6)


def test_ddp_sums_gradients_once_a_step() -> None:
    cost = costs("trainer=ddp", "trainer.devices=8")["stage2"]
    assert cost.step_traffic_bytes == pytest.approx(2 * cost.memory.trained / 4 * 7 / 8, rel=1e-6)
    assert cost.memory.gathered == 0
