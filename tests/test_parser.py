"""The grammar, one representative per rule, in two spellings that mean the same; what is no answer; sympy forms."""

import random
import time
from fractions import Fraction

import pytest
import sympy

from nano_exgrpo.checker import is_equal
from nano_exgrpo.checker.lexer import tokenize
from nano_exgrpo.checker.parser import MAX_DEPTH, ParseError, parse, parse_latex
from nano_exgrpo.checker.tree import Based, Matrix, Num, Op, Quantity, Ratio, Rel, Seq, Sym

SAME = [
    # numerals
    (r"1,234", "1234"),
    (r"1{,}234", "1234"),
    (r"1\,234\,567", "1234567"),
    (r"1,\! 234", "1234"),
    ("1 234", "1234"),
    ("60.", "60"),
    (".5", "1/2"),
    ("2.50", "5/2"),
    ("1.5e-3", "0.0015"),
    ("8.7E8", "870000000"),
    (r"3\times 10^{-7}", "0.0000003"),
    (r"1.2 \times 10^-3", "0.0012"),
    (r"0.1\overline{6}", "1/6"),
    (r"0.\dot{3}", "1/3"),
    ("0.(36)", "4/11"),
    (r"0.333\ldots", "1/3"),
    (r"2\frac{1}{2}", "5/2"),
    ("1 1/4", "5/4"),
    (r"-3\frac12", "-7/2"),
    (r"2\cdot\frac12", "1"),
    ("-1./3", "-1/3"),
    # unicode
    ("½", "1/2"),
    ("x²+1", "x^2+1"),
    ("−7", "-7"),
    ("３", "3"),
    ("𝟮", "2"),
    ("٥", "5"),
    ("3√5", r"3\sqrt{5}"),
    ("π/6", r"\frac{\pi}{6}"),
    ("4\u200b2", "42"),
    ("10⁻³", "0.001"),
    ("x₁", "x_1"),
    ("1\u2009000", "1000"),
    # fractions, roots, powers, products
    (r"\frac12", "1/2"),
    (r"\frac1{72}", "1/72"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"{1 \over 2}", "1/2"),
    (r"1\over3", "1/3"),
    ("0{.}5", "1/2"),
    (r"1 \div 4", "1/4"),
    (r"\sqrt 3\sqrt3", "3"),
    (r"\sqrt[3]{-8}", "-2"),
    ("2**10", "1024"),
    ("2^3^2", "512"),
    ("-2^2", "-4"),
    ("8/4/2", "1"),
    ("2-1-1", "0"),
    ("(3-9)(5-15)", "60"),
    ("2x y", "y*2*x"),
    (r"{a}+{b}", "b+a"),
    ("x(y-z)", "xy-xz"),
    ("n2^n", "2^n*n"),
    (r"\left[\frac{x}{2}\right]", "x/2"),
    (r"\sqrt(5)", r"\sqrt5"),
    ("[(x+1)^2]^{3/2}", "((x+1)^2)^{3/2}"),
    # functions
    (r"\sin^2 x", r"(\sin x)^2"),
    (r"\sin^{-1} x", r"\arcsin x"),
    (r"\sin 2x\cos x", r"\cos(x)\sin(2x)"),
    (r"\log_2 8", "3"),
    (r"\log_{10}\frac{1}{10}", "-1"),
    (r"\ln 8", r"3\ln 2"),
    ("np.arcsin(1/2)", r"\frac{\pi}{6}"),
    (r"\exp{-t}", "e^{-t}"),
    (r"\cos 60^\circ", "1/2"),
    ("7*sin(pi*x/5)", r"7\sin\left(\frac{\pi x}{5}\right)"),
    (r"\operatorname{lcm}(4,6)", "12"),
    (r"\max\{1,2\}", "2"),
    ("5!", "120"),
    ("6!!", "48"),
    (r"\binom52", "10"),
    (r"{5 \choose 2}", "10"),
    (r"|{-3}|", "3"),
    (r"||x||", "|x|"),
    (r"\lfloor 2.7\rfloor", "2"),
    (r"\lceil 2.1\rceil", "3"),
    (r"7 \bmod 4", "3"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
    (r"\sum_{k=1}^{10} k", "55"),
    (r"\prod_{k=1}^{4} k", "24"),
    (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}"),
    (r"\int_0^1 f(x)\,dx", r"\int_0^1 f(x) dx"),
    ("i^2", "-1"),
    (r"e^{i\pi}", "-1"),
    # symbols
    ("x_{1}+x_2", "x_2+x_1"),
    (r"\lambda_{\text{red}}", r"\lambda_{red}"),
    (r"f'(x)", r"f^{\prime}(x)"),
    (r"\mathrm{e}^2", "e^2"),
    (r"\frac{dy}{dx}", r"\frac{d y}{d x}"),
    (r"\ddot\theta(t)", r"\ddot{\theta}(t)"),
    ("a_{n+1}", "a_{1+n}"),
    (r"\vec{v}", "v"),
    # layout
    (r"\displaystyle\frac{7}{9}", "7/9"),
    (r"\mathbf{12}", "12"),
    (r"\color{red}{17}", "17"),
    (r"\colorbox{yellow}{17}", "17"),
    (r"x+3 \tag{1}", "x+3"),
    (r"\quad 13 \quad", "13"),
    ("$5$", "5"),
    ("'42'", "42"),
    ("**5**", "5"),
    (r"\text{47}", "47"),
    (r"\(5\)", "5"),
    (r"\Bigl(1,2\Bigr)", "(1,2)"),
    (r"\phantom{1}2", "2"),
    # containers and relations
    (r"\langle 1,2\rangle", "(1,2)"),
    ("(15;-29)", "(15,-29)"),
    ("]0,1[", "(0,1)"),
    (r"\{x \mid x > 2\}", r"(2,\infty)"),
    (r"\{x\in\mathbb{R} : 0 \le x\}", r"[0,\infty)"),
    (r"\mathbb{R}^+", r"(0,\infty)"),
    ("x >= 5", r"x \geqslant 5"),
    ("x != 5", r"x \neq 5"),
    (r"\left[\begin{array}{cc}1&2\end{array}\right]", r"\begin{pmatrix}1&2\\\end{pmatrix}"),
    ("[[1,2],[3,4]]", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
]


@pytest.mark.parametrize("written, plain", SAME, ids=[s[0] for s in SAME])
def test_notation(written, plain):
    assert is_equal(plain, written) and is_equal(written, plain)


@pytest.mark.parametrize(
    "text, tree",
    [
        ("3", Num(Fraction(3))),
        ("0.250", Num(Fraction(1, 4), 3)),
        ("x_1", Op("sub", (Sym("x"), Num(Fraction(1))))),
        ("(1,2]", Seq("tuple", [Num(Fraction(1)), Num(Fraction(2))], "(]")),
        ("52_8", Based("52", "8")),
        (r"2516_{\text{eight}}", Based("2516", "8")),
        ("2:3", Ratio([Num(Fraction(2)), Num(Fraction(3))])),
        ("k=1", Rel([Sym("k"), Num(Fraction(1))], ["="])),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", Matrix([[Num(Fraction(1))], [Num(Fraction(2))]])),
        ("x=1 or x=2", Seq("or", [Rel([Sym("x"), Num(Fraction(n))], ["="]) for n in (1, 2)])),
        (r"\varnothing", Seq("set", [])),
        ("50%", Op("percent", (Num(Fraction(50)),))),
        ("90°", Op("degree", (Num(Fraction(90)),))),
        (r"\pm 2", Op("pm", (Num(Fraction(2)),))),
    ],
)
def test_tree(text, tree):
    assert parse(text) == tree


def test_units_are_read_at_the_end_of_a_value():
    tree = parse(r"5\text{ km/h}")
    assert isinstance(tree, Quantity) and dict(tree.unit.dims) == {"length": 1, "time": -1}
    assert parse(r"\frac{1}{\sqrt2}c") == Op("*", (parse(r"\frac{1}{\sqrt2}"), Sym("c")))  # a factor, not a unit


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(3-9)(5-15",
        r"\frac{1}",
        r"\frac{1}{}",
        "2 3",
        "26 % 25",
        ")5(",
        "!",
        "5 &",
        r"\begin{pmatrix} 1 & 2 \\ 3",
        "1 +",
        "[]",
        "(1,2",
        r"\begin{pmatrix}1&2\\3\end{pmatrix}",
        r"\unknowncommand",
        r"\input{/etc/hostname}",
        r"5\text{ is wrong}",
        "x.__class__",
        "[1,2}",
        "5#",
        "1e999999",
        "52_",
        "52_{",
        "{" * 200 + "1" + "}" * 200,
        "1+" * 2000 + "1",
        r"\text{",
        "x^",
        "_2",
        r"\sqrt",
        r"|x",
        r"\lfloor 2 \rceil",
    ],
)
def test_all_of_the_input_is_read_or_the_parse_fails(text):
    with pytest.raises(ParseError):
        parse(text)


def test_depth_is_bounded_not_recursive():
    parse("(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1))
    for text in (
        "(" * 1000 + "1" + ")" * 1000,
        "2^" * 700 + "2",
        "5" + "!" * 1400,
        "1/" * 1400 + "1",
        "-" * 1400 + "5",
    ):
        with pytest.raises(ParseError):
            parse(text)


def test_an_ambiguous_comma_has_two_readings():
    assert [t.text for t in tokenize("1,234")][:-1] == ["1234"]
    assert [t.text for t in tokenize("1,234", lists=True)][:-1] == ["1", ",", "234"]


def _random_expression(rng: random.Random, depth: int) -> sympy.Expr:
    x, y = sympy.symbols("x y", positive=True)
    if depth == 0:
        return rng.choice(
            [
                x,
                y,
                sympy.Integer(rng.randint(1, 9)),
                sympy.Rational(rng.randint(1, 9), rng.randint(2, 9)),
                sympy.pi,
                sympy.sqrt(2),
            ]
        )
    a, b = (_random_expression(rng, depth - 1) for _ in range(2))
    return rng.choice(
        [
            lambda: a + b,
            lambda: a * b,
            lambda: a - b,
            lambda: a / (b + 11),
            lambda: (a + 1) ** rng.choice([2, -1, 3]),
            lambda: sympy.sqrt(a**2 + 1),
            lambda: sympy.sin(a),
            lambda: sympy.exp(-a),
            lambda: sympy.log(a**2 + 2),
            lambda: sympy.cos(a) ** 2,
        ]
    )()


@pytest.mark.parametrize("seed", range(60))
def test_what_sympy_prints_is_read_back(seed):
    """LaTeX and plain text of an expression are equal, and equal to it expanded; changed, they are not."""
    expression = _random_expression(random.Random(seed), 3)
    printed = sympy.latex(expression)
    assert is_equal(printed, str(expression)) and is_equal(str(expression), printed)
    assert is_equal(printed, sympy.latex(sympy.expand(expression)))
    assert is_equal(printed, printed) and not is_equal(printed, sympy.latex(expression + sympy.Rational(1, 10**6)))
    assert not is_equal(printed, sympy.latex(expression * 2 + 1 - expression * sympy.Rational(1, 1000)))


@pytest.mark.parametrize("seed", range(60))
def test_what_sympy_prints_is_the_same_sympy_object(seed):
    expression = _random_expression(random.Random(seed), 3)
    point = dict(zip(sorted(expression.free_symbols, key=str), (sympy.Rational(7, 5), sympy.Rational(13, 11))))
    read = parse_latex(sympy.latex(expression))
    same = read.subs({symbol.name: value for symbol, value in point.items()}) - expression.subs(point)
    assert read.free_symbols == {sympy.Symbol(symbol.name) for symbol in point} and abs(same.evalf(40)) < 1e-35


x, y, n = sympy.symbols("x y n")


@pytest.mark.parametrize(
    "text, form",
    [
        (r"\frac{x^2-1}{2\sqrt{8}}", (x**2 - 1) / (4 * sympy.sqrt(2))),
        ("0.1", sympy.Rational(1, 10)),
        (r"\theta_1", sympy.Symbol("theta_1")),
        (r"e^{i\pi}", -1),
        (r"\sqrt[3]{-8}", -2),
        (r"\cos 60^\circ", sympy.Rational(1, 2)),
        (r"\log_2 x", sympy.log(x) / sympy.log(2)),
        (r"\lfloor 2.5\pi\rfloor", 7),
        (r"\binom{n}{2}", sympy.binomial(n, 2)),
        (r"f(x)", sympy.Function("f")(x)),
        ("52_8", 42),
        (r"\sum_{i=0}^{n} i^2", sympy.Sum(sympy.Symbol("i") ** 2, (sympy.Symbol("i"), 0, n))),
        (r"\int_0^1 x^2\,dx", sympy.Integral(x**2, (x, 0, 1))),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", sympy.Limit(sympy.sin(x) / x, x, 0, dir="+-")),
        ("x=5", sympy.Eq(x, 5)),
        (r"0<x\le 3", sympy.And(sympy.Lt(0, x), x <= 3)),
        ("(1,2]", sympy.Interval.Lopen(1, 2)),
        (r"(-\infty,0)\cup\{1\}", sympy.Union(sympy.Interval.open(-sympy.oo, 0), sympy.FiniteSet(1))),
        ("(1,2)", sympy.Tuple(1, 2)),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T", sympy.ImmutableMatrix([[1, 3], [2, 4]])),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", -2),
    ],
)
def test_sympy_form(text, form):
    assert parse_latex(text) == form


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "99999!",
        r"\binom{10^6}{5}",
        r"\lfloor 10^{5000}\pi\rfloor",
        r"\sqrt{10^{999}}",
        "((x+1)^{9999})^{9999}" * 20,
        r"\frac00",
        r"\log 0",
        "5 cm",
        r"\pm 2",
        "3:4",
        "1=2=" * 70 + "3",
        r"(1,2)\cdot 99999999",
        r"\{1\}+2",
    ],
)
def test_no_sympy_form_is_started_that_could_take_long(text):
    start = time.thread_time()
    with pytest.raises(ParseError):
        parse_latex(text)
    assert time.thread_time() - start < 0.25
