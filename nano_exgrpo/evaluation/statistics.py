"""Statistics that let a number be believed: intervals, pass@k, maj@k, paired tests.

Pure functions on plain lists, so that each can be checked by counting. Two sources of chance are kept apart:
which *questions* the benchmark happens to hold, and which *samples* the policy happened to give. Samples of one
question are not independent, so every interval here takes the question as its unit ("clustered by question");
32 samples of 30 AIME questions are 30 observations, not 960.

The intervals are for the accuracy on questions *like these*; two policies measured on the same questions share
the first source, which is why `paired_difference` sees what two overlapping intervals cannot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95  # of every interval, unless told otherwise


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """Paired difference B − A. p: two-sided, exact sign-flip test of "no difference on any question"."""

    difference: Interval
    p: float
    wins: int  # questions (or seeds) on which B is better
    losses: int
    ties: int


# ------------------------------------------------------------------------------- one proportion or mean


def wilson(successes: float, n: float, *, quantile: float | None = None) -> Interval:
    """Wilson's score interval for a proportion: single samples of n independent questions.

    Unlike p ± 1.96·se it is sound at 0 and 1 and for small n. Real-valued counts are allowed (effective sample
    sizes). quantile: of the reference distribution; default the normal 97.5 %. Raises ValueError if n <= 0.

    >>> str(wilson(0, 30))
    '0.000 [0.000, 0.114]'
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n > 0, got {successes} of {n}")
    z = NormalDist().inv_cdf((1 + LEVEL) / 2) if quantile is None else quantile
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and 1 the ends are exact; rounding must not put the estimate outside its own interval.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def clustered_interval(question_values: Sequence[float]) -> Interval:
    """Interval for a mean over questions of values in [0, 1]: avg@k, pass@k or maj@k of each question.

    With s² the variance between questions, the mean p of n questions is as uncertain as n* = p(1−p)/(s²/n)
    independent coin flips; the interval is Wilson's at n*, with Student's t(n−1) for the normal quantile because
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
    """Accuracy with its interval from verdicts[question][sample] in {0, 1}: Wilson's where every question has one
    sample, else clustered by question. The mean is over questions of the mean over samples (avg@k)."""
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
    """Unweighted mean of independent estimates (the paper's average over benchmarks), its interval by adding the
    squared distances to each end ("square and add": Newcombe 1998, Zou and Donner 2008)."""
    n = len(intervals)
    value = fmean(i.value for i in intervals)
    below = math.hypot(*(i.value - i.low for i in intervals)) / n
    above = math.hypot(*(i.high - i.value for i in intervals)) / n
    return Interval(value, value - below, value + above)


@cache
def student_t(df: int, level: float = LEVEL) -> float:
    """The t with P(|T| ≤ t) = level for Student's distribution with `df` degrees of freedom.

    >>> round(student_t(1), 3), round(student_t(29), 3)
    (12.706, 2.045)
    """
    low, high = 0.0, 1.0
    while student_mass(high, df) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_mass(middle, df) < level else (low, middle)
    return (low + high) / 2


def student_mass(t: float, df: int) -> float:
    """P(|T| ≤ t) for Student's T, df a whole number: the finite series of Abramowitz and Stegun 26.7.3-4."""
    if df < 1:
        raise ValueError(f"degrees of freedom must be a whole number from 1 up, got {df}")
    angle = math.atan2(abs(t), math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for m in range(2 if odd else 1, df - 1, 2):
        term *= m / (m + 1) * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


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
        ways = {(top, 0): math.comb(correct, top)}
        for size in others:
            grown: dict[tuple[int, int], int] = {}
            for (drawn, tied), count in ways.items():
                for votes in range(min(size, top, k - drawn) + 1):
                    key = (drawn + votes, tied + (votes == top))
                    grown[key] = grown.get(key, 0) + count * math.comb(size, votes)
            ways = grown
        for (drawn, tied), count in ways.items():
            favourable += Fraction(count * math.comb(silent, k - drawn), tied + 1)
    return float(favourable / math.comb(n, k))


def group_answers(
    answers: Iterable[str | None], right: Iterable[float], is_equal: Callable[[str, str], bool]
) -> tuple[int, list[int]]:
    """(correct, others) for `maj_at_k`: how many samples are right, and the sizes of the groups of equal wrong
    answers, largest first. An answer joins the first group whose first member it equals; None does not vote."""
    correct = 0
    counts: dict[str, int] = {}  # equal strings need no comparison
    for answer, verdict in zip(answers, right, strict=True):
        if verdict:
            correct += 1
        elif answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
    groups: dict[str, int] = {}
    for answer, count in counts.items():
        first = next((other for other in groups if is_equal(other, answer)), answer)
        groups[first] = groups.get(first, 0) + count
    return correct, sorted(groups.values(), reverse=True)


# ------------------------------------------------------------------------------------------- comparisons


def paired_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Comparison:
    """Is B better than A on the same questions? a, b: verdicts[question][sample] in {0, 1}, same question order.

    The interval is for the mean over questions of (accuracy of B − accuracy of A): with single samples the
    adjusted Wald interval of Bonett and Price 2012 (as if one more question had been won and one more lost, so
    that few discordant questions do not give a width of 0), else Student's t on the questions' differences.
    The test is `sign_flip_p`; with single samples that *is* the exact McNemar test.
    Raises ValueError when the lists differ in length or are empty.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"the two sides must have the same questions, got {len(a)} and {len(b)}")
    exact = [_exact_mean(y) - _exact_mean(x) for x, y in zip(a, b, strict=True)]
    differences = [float(d) for d in exact]
    single = all(len(x) == 1 for x in (*a, *b))
    if single or len(set(exact)) == 1:
        interval = _bonett_price(differences)
    else:
        interval = mean_interval(differences)
        interval = Interval(interval.value, max(-1.0, interval.low), min(1.0, interval.high))
    return _comparison(interval, exact)


def paired_seeds(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Is B better than A over the same seeds? a, b: one result a seed. Student's t interval of the differences
    and the exact sign-flip test (whose smallest p is 2^(1 − seeds): 8 seeds can reach 0.008, 5 only 0.06)."""
    if len(a) != len(b) or not a:
        raise ValueError(f"the two sides must have the same seeds, got {len(a)} and {len(b)}")
    exact = [
        Fraction(y).limit_denominator(10**6) - Fraction(x).limit_denominator(10**6) for x, y in zip(a, b, strict=True)
    ]
    return _comparison(mean_interval([y - x for x, y in zip(a, b, strict=True)]), exact)


def _comparison(interval: Interval, differences: Sequence[Fraction]) -> Comparison:
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Comparison(interval, sign_flip_p(differences), wins, losses, len(differences) - wins - losses)


def sign_flip_p(differences: Sequence[Fraction | int]) -> float:
    """Two-sided p of the sign-flip (paired permutation) test: were A and B exchangeable on every question, each
    difference would have had either sign with chance ½; p = P(|Σ ±d| ≥ |Σ d|).

    Exact, by counting the sums over all 2^n sign patterns: thousands of questions are cheap because their
    differences share a denominator. Beyond a million distinct sums (dozens of incommensurable values) it uses the
    normal approximation with the same variance.

    >>> sign_flip_p([1] * 5 + [0] * 9), sign_flip_p([1, -1])
    (0.0625, 1.0)
    """
    sizes = [abs(Fraction(d)) for d in differences if d]
    scale = math.lcm(*(d.denominator for d in sizes)) if sizes else 1
    observed = abs(int(sum(differences) * scale))
    sums = {0: 1}  # how many sign patterns of the differences seen so far have this sum
    for unit, many in Counter(int(d * scale) for d in sizes).items():
        patterns, ways = [], 1  # (step, C(many, plus)): `plus` of the `many` equal ones have a positive sign
        for plus in range(many + 1):
            patterns.append((unit * (2 * plus - many), ways))
            ways = ways * (many - plus) // (plus + 1)
        grown: dict[int, int] = {}
        for total, count in sums.items():
            for step, ways in patterns:
                grown[total + step] = grown.get(total + step, 0) + count * ways
        sums = grown
        if len(sums) > 1_000_000:
            return 2 * (1 - NormalDist().cdf(abs(float(sum(differences))) / math.hypot(*map(float, sizes))))
    extreme = sum(count for total, count in sums.items() if abs(total) >= observed)
    return float(Fraction(extreme, 2 ** len(sizes)))


def _exact_mean(verdicts: Sequence[float]) -> Fraction:
    return Fraction(round(sum(verdicts)), len(verdicts))


def _bonett_price(differences: Sequence[float]) -> Interval:
    extended = [*differences, 1.0, -1.0]
    n = len(extended)
    mean = fmean(extended)
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(fmean((d - mean) ** 2 for d in extended) / n)
    return Interval(fmean(differences), max(-1.0, mean - half), min(1.0, mean + half))
