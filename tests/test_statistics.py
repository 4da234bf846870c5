"""Every statistic against counting by hand, enumeration, or simulation."""

import itertools
import math
import random
import sys
from fractions import Fraction
from statistics import NormalDist, fmean

import pytest
from scipy.stats import binomtest

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.statistics import (
    Interval,
    accuracy_interval,
    average,
    clustered_interval,
    group_answers,
    maj_at_k,
    mean_interval,
    paired_difference,
    paired_seeds,
    pass_at_k,
    sign_flip_p,
    student_t,
    wilson,
)

# ------------------------------------------------------------------------------- intervals


def test_wilson_ends_are_where_the_score_test_just_accepts():
    z = NormalDist().inv_cdf(0.975)
    for successes, n in [(1, 5), (7, 10), (13, 200), (199, 200)]:
        interval = wilson(successes, n)
        for end in (interval.low, interval.high):
            assert abs(successes / n - end) / math.sqrt(end * (1 - end) / n) == pytest.approx(z)


def test_wilson_published_values():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert (wilson(successes, n).low, wilson(successes, n).high) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("successes, n", [(0, 7), (7, 7), (0, 1)])
def test_wilson_stays_in_range_at_the_edges_and_has_width(successes, n):
    interval = wilson(successes, n)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1 and interval.high - interval.low > 0.3


def test_wilson_coverage_exactly_summed():
    """Coverage summed over the binomial distribution, no simulation: near 95 % on average over p."""
    coverage = []
    for p in [0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.9]:
        inside = (c for c in range(61) if wilson(c, 60).low <= p <= wilson(c, 60).high)
        coverage.append(sum(math.comb(60, c) * p**c * (1 - p) ** (60 - c) for c in inside))
    assert min(coverage) > 0.91 and fmean(coverage) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(
    "df, t", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (29, 2.0452), (120, 1.9799)]
)
def test_student_t_against_the_printed_table(df, t):
    assert student_t(df) == pytest.approx(t, abs=5e-5)


def test_numbers_of_this_project_s_earlier_hand_written_statistics():
    """Student's t was once summed up here by hand; scipy's must give the published tables of RESULTS.md again."""
    close = lambda x: pytest.approx(x, abs=1e-9)  # noqa: E731
    assert [student_t(df) for df in (1, 4, 199)] == close([12.706204736174676, 2.7764451051977934, 1.9719565442517548])
    verdicts = [[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [0.0, 0.0, 1.0, 0.0]]
    i = accuracy_interval(verdicts)
    assert (i.value, i.low, i.high) == close((0.4375, 0.07555662351768017, 0.8809734161660161))
    other = [[1.0, 1.0, 0.0, 1.0], [1.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
    result = paired_difference(verdicts, other)
    assert (result.interval.low, result.interval.high, result.p) == close(
        (-0.011402894080231651, 0.38640289408023165, 0.25)
    )


def test_wilson_and_mcnemar_against_scipy():
    for successes, n in [(0, 7), (3, 10), (81, 263), (40, 40)]:
        theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
        ours = wilson(successes, n)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    for wins, losses in [(3, 1), (12, 3), (700, 640)]:
        assert sign_flip_p([1] * wins + [-1] * losses + [0] * 9) == pytest.approx(
            binomtest(wins, wins + losses).pvalue, abs=1e-9
        )


def test_without_scipy_single_samples_need_none_and_several_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    student_t.cache_clear()
    assert accuracy_interval([[1.0], [0.0]]) == wilson(1, 2)  # what training measures
    with pytest.raises(InputError, match="pip install scipy"):
        accuracy_interval([[1.0, 0.0], [0.0, 0.0]])


def _benchmark(rng, questions, samples, shape):
    """One simulated benchmark: success rates Beta(shape), then `samples` verdicts of each question."""
    rates = [rng.betavariate(*shape) for _ in range(questions)]
    return [[float(rng.random() < rate) for _ in range(samples)] for rate in rates]


@pytest.mark.parametrize(
    "questions, samples, shape, floor",
    [
        (30, 8, (0.3, 0.7), 0.925),  # AIME-like: many questions never solved
        (30, 8, (0.1, 0.9), 0.90),  # few ever solved: the hardest case
        (10, 8, (0.5, 0.5), 0.925),  # few questions: Student's t matters
        (60, 1, (0.5, 0.5), 0.925),  # single samples: Wilson
        (40, 4, (2, 2), 0.925),
    ],
)
def test_accuracy_interval_covers_the_truth_in_95_percent_of_simulated_benchmarks(questions, samples, shape, floor):
    rng, runs = random.Random(5), 600  # standard error of the coverage: 0.9 points
    truth = shape[0] / sum(shape)
    intervals = [accuracy_interval(_benchmark(rng, questions, samples, shape)) for _ in range(runs)]
    assert floor < fmean(i.low <= truth <= i.high for i in intervals) < 0.98


def test_samples_of_one_question_are_not_counted_as_independent():
    """Half the questions always solved, half never: 32 samples say no more than one."""
    verdicts = [[1.0] * 32] * 15 + [[0.0] * 32] * 15
    clustered, naive, single = accuracy_interval(verdicts), wilson(480, 960), wilson(15, 30)
    width = lambda i: i.high - i.low  # noqa: E731
    assert width(clustered) > 4 * width(naive)
    assert width(clustered) == pytest.approx(width(single), rel=0.1)


def test_never_solved_still_has_an_upper_end():
    assert accuracy_interval([[0.0] * 32] * 30) == Interval(0.0, 0.0, pytest.approx(0.122, abs=1e-3))
    assert clustered_interval([0.4]) == Interval(0.4, 0.0, 1.0)  # one question says nothing
    with pytest.raises(ValueError):
        clustered_interval([])


def test_mean_interval_by_hand_and_its_coverage_with_five_seeds():
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])  # s = √2.5, t(4) = 2.7764
    assert interval.low == pytest.approx(3 - 2.7764 * math.sqrt(2.5 / 5), abs=1e-4)
    assert mean_interval([2.0]).high == math.inf
    rng = random.Random(0)
    hits = [
        abs((i := mean_interval([rng.gauss(0.3, 2) for _ in range(5)])).value - 0.3) <= i.high - i.value
        for _ in range(3000)
    ]
    assert fmean(hits) == pytest.approx(0.95, abs=0.012)


def test_average_of_benchmarks():
    same = Interval(0.5, 0.4, 0.6)
    assert average([same] * 4) == Interval(0.5, pytest.approx(0.45), pytest.approx(0.55))  # 1/√4
    lopsided = average([Interval(0.0, 0.0, 0.2), Interval(0.5, 0.3, 0.7)])
    assert (lopsided.value, lopsided.low, lopsided.high) == pytest.approx((0.25, 0.15, 0.25 + math.hypot(0.2, 0.2) / 2))


# ------------------------------------------------------------------------------- pass@k and maj@k


def test_pass_at_k_against_enumeration():
    for n in range(1, 7):
        for correct in range(n + 1):
            verdicts = [1] * correct + [0] * (n - correct)
            for k in range(1, n + 1):
                brute = fmean(max(draw) for draw in itertools.combinations(verdicts, k))
                assert pass_at_k(n, correct, k) == pytest.approx(brute)
    with pytest.raises(ValueError):
        pass_at_k(4, 2, 5)


def test_pass_at_k_is_unbiased():
    """Averaged over the binomial distribution of c it is exactly 1 − (1−p)^k; 1 − (1 − c/n)^k is not."""
    n, k, p = 8, 3, 0.3
    weight = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weight)) == pytest.approx(1 - (1 - p) ** k)
    assert sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weight)) != pytest.approx(1 - (1 - p) ** k, abs=0.01)


def _brute_force_vote(correct, others, silent, k):
    """Every draw of k labelled samples; "right" wins, shares a tie, or loses."""
    labels = ["right"] * correct + [i for i, size in enumerate(others) for _ in range(size)] + [None] * silent
    score = []
    for draw in itertools.combinations(labels, k):
        counts = {label: draw.count(label) for label in draw if label is not None}
        best = [label for label, count in counts.items() if count == max(counts.values())]
        score.append(Fraction("right" in best, len(best) or 1))
    return float(sum(score) / len(score))


def test_maj_at_k_against_enumeration():
    cases = [(3, [2, 1], 1), (2, [2, 2], 0), (1, [3], 2), (0, [2, 1], 1), (4, [], 2), (2, [1, 1, 1, 1], 1), (0, [], 3)]
    for correct, others, silent in cases:
        n = correct + sum(others) + silent
        for k in range(1, n + 1):
            assert maj_at_k(correct, others, n, k) == pytest.approx(_brute_force_vote(correct, others, silent, k))


def test_maj_at_one_is_accuracy_and_votes_are_grouped_by_value():
    assert maj_at_k(3, [2, 4], 10, 1) == pytest.approx(0.3)
    correct, others = group_answers(
        ["1/2", "0.5", "2/4", "7", None, "7.0", "8"],
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        lambda a, b: float(a) == float(b),
    )
    assert (correct, others) == (3, [2, 1])


# ------------------------------------------------------------------------------- paired comparisons


def test_sign_flip_against_enumeration():
    rng = random.Random(1)
    for _ in range(30):
        differences = [Fraction(rng.randint(-4, 4), rng.choice([1, 2, 3])) for _ in range(rng.randint(1, 9))]
        sums = [
            sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product([1, -1], repeat=len(differences))
        ]
        brute = fmean(abs(s) >= abs(sum(differences)) for s in sums)
        assert sign_flip_p(differences) == pytest.approx(brute)
    assert sign_flip_p([]) == 1.0 and sign_flip_p([0, 0]) == 1.0


def test_single_samples_give_the_exact_mcnemar_test():
    """12 questions only B solved, 3 only A: two-sided binomial p = 2·P(X ≤ 3 | 15, ½) = 0.03515625."""
    a = [[0.0]] * 12 + [[1.0]] * 3 + [[1.0]] * 40 + [[0.0]] * 20
    b = [[1.0]] * 12 + [[0.0]] * 3 + [[1.0]] * 40 + [[0.0]] * 20
    result = paired_difference(a, b)
    assert result.p == 2 * sum(math.comb(15, i) for i in range(4)) / 2**15 == 0.03515625
    assert (result.wins, result.losses, result.ties) == (12, 3, 60)
    assert result.interval.value == pytest.approx(9 / 75)
    # Bonett and Price by hand: (13 − 4)/77 ± 1.96·√((13/77 + 4/77 − (9/77)²)/77)
    half = 1.959964 * math.sqrt((17 / 77 - (9 / 77) ** 2) / 77)
    assert (result.interval.low, result.interval.high) == pytest.approx((9 / 77 - half, 9 / 77 + half))


def test_pairing_sees_what_overlapping_intervals_hide():
    """B solves all that A solves and 8 questions more, out of 200."""
    a, b = [[1.0]] * 90 + [[0.0]] * 110, [[1.0]] * 98 + [[0.0]] * 102
    assert accuracy_interval(a).high > accuracy_interval(b).value  # unpaired: nothing to see
    result = paired_difference(a, b)
    assert result.interval.low > 0 and result.p == pytest.approx(2 / 2**8)


def test_equal_models_and_bad_input():
    same = paired_difference([[1.0, 0.0]] * 5, [[1.0, 0.0]] * 5)
    assert same.p == 1.0 and same.interval.low < 0 < same.interval.high
    with pytest.raises(ValueError):
        paired_difference([[1.0]], [[1.0], [0.0]])


@pytest.mark.parametrize("samples", [1, 4])
def test_paired_interval_covers_and_the_test_keeps_its_level(samples):
    """B differs from A on each question by chance, not on average."""
    rng, runs = random.Random(7), 500
    covered, rejected = 0, 0
    for _ in range(runs):
        rates = [rng.betavariate(0.4, 0.6) for _ in range(40)]
        other = [rate if rng.random() < 0.5 else 0.4 + 0.6 * (rate - 0.4) for rate in rates]  # same mean, 0.4
        a = [[float(rng.random() < rate) for _ in range(samples)] for rate in rates]
        b = [[float(rng.random() < rate) for _ in range(samples)] for rate in other]
        result = paired_difference(a, b)
        covered += result.interval.low <= 0 <= result.interval.high
        rejected += result.p < 0.05
    assert 0.925 <= covered / runs <= 0.985  # standard error: 1 point
    assert rejected / runs <= 0.07


def test_paired_interval_covers_a_true_difference():
    rng, runs, hits = random.Random(3), 600, 0
    for _ in range(runs):  # B solves 12 % of the questions alone, A 4 % alone
        outcomes = rng.choices([(0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)], [0.12, 0.04, 0.5, 0.34], k=150)
        result = paired_difference([[x] for x, _ in outcomes], [[y] for _, y in outcomes])
        hits += result.interval.low <= 0.08 <= result.interval.high
    assert hits / runs == pytest.approx(0.95, abs=0.025)


def test_paired_seeds():
    a, b = [0.50, 0.62, 0.41, 0.58, 0.47, 0.66, 0.53, 0.60], [0.55, 0.66, 0.50, 0.60, 0.55, 0.69, 0.57, 0.68]
    result = paired_seeds(a, b)
    assert result.p == 2 / 2**8 and (result.wins, result.losses) == (8, 0)
    assert result.interval.low > 0 and mean_interval(a).high > mean_interval(b).low  # pairing removes the seeds' spread
    rng, hits = random.Random(2), 0
    for _ in range(1500):
        level = [rng.gauss(0.5, 0.2) for _ in range(6)]
        pair = paired_seeds([x + rng.gauss(0, 0.05) for x in level], [x + 0.03 + rng.gauss(0, 0.05) for x in level])
        hits += pair.interval.low <= 0.03 <= pair.interval.high
    assert hits / 1500 == pytest.approx(0.95, abs=0.017)


def test_many_incommensurable_differences_fall_back_to_the_normal_approximation():
    rng = random.Random(0)
    differences = [Fraction(rng.gauss(0.3, 1)).limit_denominator(10**6) for _ in range(60)]
    z = abs(sum(map(float, differences))) / math.sqrt(sum(float(d) ** 2 for d in differences))
    assert sign_flip_p(differences) == pytest.approx(2 * (1 - NormalDist().cdf(z)))
