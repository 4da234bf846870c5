"""Statistics that let a number be believed: intervals, pass@k, maj@k, paired tests.

Pure functions on plain lists, so that each can be checked by counting. Two sources of chance are kept apart:
which *questions* the benchmark happens to hold, and which *samples* the policy happened to give. Samples of one
question are not independent. So every interval takes the question as its unit ("clustered by question"):
32 samples of 30 AIME questions are 30 observations, not 960.

The intervals are for the accuracy on questions *like these*. Two policies measured on the same questions share the
first source of chance, so `paired_difference` sees what two overlapping intervals cannot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import NormalDist, fmean, stdev

from nano_exgrpo.errors import InputError

LEVEL = 0.95  # of every interval
NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)  # the z with P(|Z| ≤ z) = LEVEL


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """B − A, paired. p: two-sided, of the exact sign-flip test. wins, losses, ties: questions (or seeds) on which B is
    better, worse, the same."""

    interval: Interval
    p: float
    wins: int
    losses: int
    ties: int


# ------------------------------------------------------------------------------- one proportion or mean


def wilson(successes: float, n: float, *, quantile: float = NORMAL) -> Interval:
    """Wilson's score interval for a proportion: single samples of n independent questions.

    Unlike p ± 1.96·se it is sound at 0 and 1 and for small n. The counts may be real numbers (effective sample
    sizes). quantile: of the reference distribution. Raises ValueError if n <= 0.

    >>> str(wilson(0, 30))
    '0.000 [0.000, 0.114]'
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n > 0, got {successes} of {n}")
    z, p = quantile, successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and 1 the ends are exact; rounding must not put the estimate outside its own interval.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def clustered_interval(question_values: Sequence[float]) -> Interval:
    """Interval for a mean over questions of values in [0, 1]: avg@k, pass@k or maj@k of each question.

    With s² the variance between questions, the mean p of n questions is as uncertain as n* = p(1−p)/(s²/n)
    independent coin flips. The interval is Wilson's at n*, with Student's t(n−1) for the normal quantile, because
    s² is itself estimated (the modified Wilson interval of survey sampling: Korn and Graubard 1998; Franco et al.
    2019). A plain p ± t·s/√n has width 0 when no question was ever solved, and covers too rarely when few were:
    on 30 simulated questions whose success rates are Beta(0.1, 0.9), 89 % instead of 95 %, this one 93 %.
    Where s = 0, n* is n. Raises ValueError on an empty list or values outside [0, 1].
    """
    n = len(question_values)
    if n == 0 or not all(0 <= v <= 1 for v in question_values):
        raise ValueError("need at least one question, and values in [0, 1]")
    p = min(1.0, fmean(question_values))
    if n == 1:
        return Interval(p, 0.0, 1.0)  # one question says nothing about questions
    variance = stdev(question_values) ** 2
    effective = p * (1 - p) / (variance / n) if variance > 1e-15 else n
    return wilson(p * effective, effective, quantile=student_t(n - 1))


def accuracy_interval(verdicts: Sequence[Sequence[float]]) -> Interval:
    """Mean over questions of the mean over samples (avg@k), from verdicts[question][sample] in {0, 1}. The interval is
    Wilson's where every question has one sample (as in training), else clustered by question."""
    if all(len(samples) == 1 for samples in verdicts):
        return wilson(sum(samples[0] for samples in verdicts), len(verdicts))
    return clustered_interval([fmean(samples) for samples in verdicts])


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and Student-t interval of independent values of any range, such as one result a seed.

    One value alone gives an infinite interval. Raises ValueError on an empty list."""
    if not values:
        raise ValueError("need at least one value")
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def average(intervals: Sequence[Interval]) -> Interval:
    """Unweighted mean of independent estimates (the paper's average over benchmarks). Its interval adds the squared
    distances to each end ("square and add": Newcombe 1998, Zou and Donner 2008)."""
    n, value = len(intervals), fmean(i.value for i in intervals)
    below = math.hypot(*(i.value - i.low for i in intervals)) / n
    above = math.hypot(*(i.high - i.value for i in intervals)) / n
    return Interval(value, value - below, value + above)


@cache
def student_t(df: int) -> float:
    """The t with P(|T| ≤ t) = `LEVEL` for Student's distribution. Raises InputError where scipy is not installed."""
    try:
        from scipy.stats import t
    except ImportError:
        raise InputError("intervals over several samples or seeds need scipy (pip install scipy)") from None
    return float(t.ppf((1 + LEVEL) / 2, df))


# ------------------------------------------------------------------------------- several samples a question


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn from these n (without replacement) is right: the unbiased
    estimator of Chen et al. 2021, 1 − C(n−c, k)/C(n, k). Raises ValueError unless 1 <= k <= n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"need 1 <= k <= n and 0 <= correct <= n, got k {k}, n {n}, correct {correct}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def maj_at_k(correct: int, others: Sequence[int], n: int, k: int) -> float:
    """Probability that a majority vote of k samples drawn from these n (without replacement) is right.

    The exact expectation over all C(n, k) draws, not one sampled vote. correct: samples with the right answer;
    others: the sizes of the groups of equal wrong answers. The n − correct − Σothers samples left have no answer
    and do not vote. The largest group wins; a tie is broken by a fair draw among the largest; no vote is wrong.
    With k = n it is the plain vote over all samples. Raises ValueError unless 1 <= k <= n.

    >>> maj_at_k(2, [2], 4, 4), maj_at_k(1, [1, 1], 3, 3) == 1 / 3
    (0.5, True)
    """
    silent = n - correct - sum(others)
    if not 1 <= k <= n or silent < 0 or correct < 0 or any(size < 1 for size in others):
        raise ValueError(f"need 1 <= k <= n and groups within n, got k {k}, n {n}, groups {correct}, {list(others)}")
    favourable = Fraction(0)
    for top in range(1, min(correct, k) + 1):  # the right answer gets `top` votes and no other more
        # ways[(drawn, tied)]: ways to draw `drawn` samples of the groups seen, `tied` of which have `top` votes too
        ways = Counter({(top, 0): math.comb(correct, top)})
        for size in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (drawn, tied), count in ways.items():
                for votes in range(min(size, top, k - drawn) + 1):
                    grown[drawn + votes, tied + (votes == top)] += count * math.comb(size, votes)
            ways = grown
        for (drawn, tied), count in ways.items():
            favourable += Fraction(count * math.comb(silent, k - drawn), tied + 1)
    return float(favourable / math.comb(n, k))


def group_answers(
    answers: Iterable[str | None], right: Iterable[float], is_equal: Callable[[str, str], bool]
) -> tuple[int, list[int]]:
    """(correct, others) for `maj_at_k`: how many samples are right, and the sizes of the groups of equal wrong
    answers, largest first. An answer joins the first group whose first member it equals; None does not vote."""
    votes = list(zip(answers, right, strict=True))
    counts = Counter(answer for answer, verdict in votes if not verdict and answer is not None)
    groups: Counter[str] = Counter()
    for answer, count in counts.items():  # equal strings need no comparison
        groups[next((other for other in groups if is_equal(other, answer)), answer)] += count
    return sum(bool(verdict) for _, verdict in votes), sorted(groups.values(), reverse=True)


# ------------------------------------------------------------------------------------------- comparisons


def paired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Difference:
    """Is B better than A on the same questions? a, b: verdicts[question][sample] in {0, 1}, same question order.

    The interval is for the mean over questions of (accuracy of B − accuracy of A). With single samples it is the
    adjusted Wald interval of Bonett and Price 2012: as if one more question had been won and one more lost, so
    that few discordant questions do not give a width of 0. Else it is Student's t on the questions' differences.
    The test is `sign_flip_p`; with single samples that *is* the exact McNemar test.
    Raises ValueError when the lists differ in length or are empty.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"the two sides must have the same questions, got {len(a)} and {len(b)}")
    mean = lambda verdicts: Fraction(round(sum(verdicts)), len(verdicts))  # noqa: E731
    exact = [mean(y) - mean(x) for x, y in zip(a, b, strict=True)]
    differences = [float(d) for d in exact]
    if all(len(x) == 1 for x in (*a, *b)) or len(set(exact)) == 1:
        extended = [*differences, 1.0, -1.0]
        centre = fmean(extended)
        half = NORMAL * math.sqrt(fmean((d - centre) ** 2 for d in extended) / len(extended))
        interval = Interval(fmean(differences), centre - half, centre + half)
    else:
        interval = mean_interval(differences)
    return count_signs(Interval(interval.value, max(-1.0, interval.low), min(1.0, interval.high)), exact)


def paired_seeds(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Is B better than A over the same seeds? a, b: one result a seed. Student's t interval of the differences
    and the exact sign-flip test (whose smallest p is 2^(1 − seeds): 8 seeds can reach 0.008, 5 only 0.06)."""
    if len(a) != len(b) or not a:
        raise ValueError(f"the two sides must have the same seeds, got {len(a)} and {len(b)}")
    exact = lambda x: Fraction(x).limit_denominator(10**6)  # noqa: E731
    interval = mean_interval([y - x for x, y in zip(a, b, strict=True)])
    return count_signs(interval, [exact(y) - exact(x) for x, y in zip(a, b, strict=True)])


def count_signs(interval: Interval, differences: Sequence[Fraction]) -> Difference:
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Difference(interval, sign_flip_p(differences), wins, losses, len(differences) - wins - losses)


def sign_flip_p(differences: Sequence[Fraction | int]) -> float:
    """Two-sided p of the sign-flip (paired permutation) test: were A and B exchangeable on every question, each
    difference would have had either sign with chance ½; p = P(|Σ ±d| ≥ |Σ d|).

    Exact, by counting the sums over all 2^n sign patterns: thousands of questions are cheap because their
    differences share a denominator. (scipy's permutation test draws at random beyond a dozen.) Beyond a million
    distinct sums, of dozens of incommensurable values, it is the normal approximation with the same variance.

    >>> sign_flip_p([1] * 5 + [0] * 9), sign_flip_p([1, -1])
    (0.0625, 1.0)
    """
    sizes = [abs(Fraction(d)) for d in differences if d]
    scale = math.lcm(*(d.denominator for d in sizes)) if sizes else 1
    sums = Counter({0: 1})  # how many sign patterns of the differences seen so far have this sum
    for unit, many in Counter(int(d * scale) for d in sizes).items():
        steps = [(unit * (2 * plus - many), math.comb(many, plus)) for plus in range(many + 1)]  # `plus` are positive
        grown: Counter[int] = Counter()
        for total, count in sums.items():
            for step, ways in steps:
                grown[total + step] += count * ways
        sums = grown
        if len(sums) > 1_000_000:
            return 2 * (1 - NormalDist().cdf(abs(float(sum(differences))) / math.hypot(*map(float, sizes))))
    observed = abs(int(sum(differences) * scale))
    extreme = sum(count for total, count in sums.items() if abs(total) >= observed)
    return float(Fraction(extreme, 2 ** len(sizes)))
