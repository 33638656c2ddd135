import pytest

from libra.scheduler_plugin.cmlfq.sketch import ACCURACY, LENGTHS, MAX_BINS, Sketch, bin_of


def test_mean_and_p90_of_what_was_counted():
    sketch = Sketch()
    for length in range(1, 1001):
        sketch.add(length, now=0, half_life=100)
    assert sketch.mean() == pytest.approx(500.5)
    assert sketch.quantile(0.9) == pytest.approx(900, rel=ACCURACY)
    assert sketch.evidence(now=0, half_life=100) == 1000


def test_old_lengths_count_half_after_a_half_life_in_mean_and_quantile_alike():
    sketch = Sketch()
    for _ in range(100):
        sketch.add(1_000, now=0, half_life=50)
    for _ in range(25):
        sketch.add(9_000, now=100, half_life=50)
    # 100 old ones at a quarter each: as many as the new ones.
    assert sketch.evidence(now=100, half_life=50) == pytest.approx(50)
    assert sketch.mean() == pytest.approx(5_000)
    assert sketch.quantile(0.49) == pytest.approx(1_000, rel=ACCURACY)
    assert sketch.quantile(0.51) == pytest.approx(9_000, rel=ACCURACY)


def test_long_waits_neither_overflow_nor_leave_dust():
    sketch = Sketch()
    for round_ in range(50):
        sketch.add(10 * (round_ + 1), now=round_ * 10_000, half_life=1.0)
    assert sketch.mean() == pytest.approx(500)
    assert sketch.quantile(0.5) == pytest.approx(500, rel=ACCURACY)
    assert len(sketch.bins) == 1


def test_every_length_up_to_a_million_is_within_the_accuracy():
    for length in [*range(1, 2_000), *(int(1.07**n) for n in range(120, 204))]:
        assert LENGTHS[bin_of(length)] == pytest.approx(length, rel=ACCURACY + 1e-9)


def test_lengths_out_of_range_count_as_the_nearest_inside():
    assert bin_of(0) == 0
    assert bin_of(1e12) == MAX_BINS - 1
