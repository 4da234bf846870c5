r"""Two answers -> equal or not: the policy, stated here once.

- **Numbers.** An exact gold needs an exact answer: the same number, to 40 digits *relative* to its size unless both are
  rational. 12 or more digits of an exact value are equal to it if they are right, the last one within one unit.
- **Expressions** are equal if they are at several random points. Constants of integration are compared by name.
- **Percent.** p% is p/100. The sign may be dropped or added on a number of at least 1; so may a degree sign.
- **Units** dropped or added are fine, a conflicting one is not. A counted noun needs a number: `B major` is not B.
- **Labels** dropped or added are fine: `x=5`, `f^{-1}(x)=...`, `P(A|B)=...`, `\Delta x=5`, a sum of different letters
  (`m+n=116`, but no line `x+y=3` as the gold). One letter with a factor is an equation: `2x=10` is not 10.
- **Equations** are equal if one is the other times a factor that makes no new solution. In a differential equation x'
  is dx/dt and x is x(t).
- **Lists and sets** are unordered, a value repeated in a set counts once; tuples are ordered. A bare list and a tuple
  in the same order are equal, unless the tuple is an interval by its ends. `a or b` is one value only if a equals b.
- **Intervals** equal the inequalities that they solve. In a piecewise function "otherwise" stands for the one condition
  that holds where the others do not.
- **Vectors and matrices** are equal entry by entry; (a, b, c) is a i + b j + c k.
- **Ratios** are equal proportionally. A gold ratio a:b takes the quotient a/b, a gold quotient takes no ratio.
- **Times of day** are equal on the clock of 24 hours, or as written if one of them does not say which half of the day.
- **Numerals with a base** are compared as written.
- **Infinite sums, products and limits** have a value if their extrapolation clearly converges.
- **Words.** Case does not matter. Number words to a hundred and ordinals are numbers. A sentence that ends in "is",
  "equals" or "=" and a value states it, unless it denies. `Yes` of "Yes, because ..." decides; `yes` is not `true`.
- **Choices.** `C`, `C)`, `Option C` and `C. 1-i` are one choice; a gold `C. 1-i` takes its letter or its content.

Points where a side has no value, or leaves the reals, are no evidence unless there is no other. Where numbers are of
such different size that 60 digits hide one (pi + 10^-50), more are taken. Where values do not tell, sympy's canonical
forms do (see `sympy_form`). What neither tells is not equal. A verdict has a budget of work: it takes milliseconds.
"""

from __future__ import annotations

from fractions import Fraction

from nano_exgrpo.checker import tree
from nano_exgrpo.checker.evaluator import Evaluator, close, sample, settled
from nano_exgrpo.checker.functions import DIGITS, NOISE, Undefined, divide
from nano_exgrpo.checker.lexer import AMBIGUOUS_COMMA, MAX_CHARS, tokenize
from nano_exgrpo.checker.parser import ParseError, parse_tokens
from nano_exgrpo.checker.real_sets import FLIPPED, RealLine
from nano_exgrpo.checker.tree import Based, Matrix, Node, Num, Op, Quantity, Ratio, Rel, Seq, Sym
from nano_exgrpo.checker.units import DIMENSIONS
from nano_exgrpo.checker.words import readings, same_words

BUDGET = 8_000  # work units of one verdict, some 5 microseconds each
SETTLING = 6_000  # ... of the infinite sums and limits of one side
MAX_ITEMS = 64  # of a list or set
MAX_ENTRIES = 64  # of a matrix
PLUS_MINUS = {"pm", "mp"}
POINTS = 7  # random points for expressions with symbols
WHOLE_POINTS = 41  # whole numbers for expressions with floors: all from 1 to 41
MAX_TURNS = 3  # numerals, and symbols, of which turning points are tried
MAX_FORMS = 2  # comparisons of sympy forms in one verdict; one takes 1 to 80 milliseconds
LITERAL_DIGITS = 12  # a decimal literal of so many right digits stands for the exact value
MAX_DIGITS = 2_000  # in which numbers of very different size are compared
STEPS = {"floor", "ceil", "mod"}
TURNS = STEPS | {"abs", "min", "max", "sgn", "sqrt", "root", "gcd", "lcm", "binom"}  # ... at numbers that occur in them
ANGLES = {"pi", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"}  # they show that an angle is in radians
WHOLE = STEPS | {"factorial", "factorial2", "binom", "sum", "prod", "gcd", "lcm"}  # mean little off the integers
BIG = {"sum", "prod", "int", "lim"}
OPAQUE = {"call", "sub", "int", "lim", "sum", "prod"}  # have random values (see `values`)


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """(whether `answer` states the same answer as `gold`, what decided it)."""
    if max(len(gold), len(answer)) > MAX_CHARS:
        return False, f"longer than {MAX_CHARS} characters"
    why = ""
    for lists in (False, True) if any(map(AMBIGUOUS_COMMA.search, (gold, answer))) else (False,):
        tokens = tokenize(gold, lists)
        for left, right in readings(tokens, tokenize(answer, lists)):
            if same_words(left, right):
                return True, "the same words and signs"
            try:
                judge = Judge(parse_tokens(list(left)), parse_tokens(list(right)))
            except ParseError as error:
                why = why or f"not parsed: {error}"
                continue
            if judge.verdict():
                return True, "equal"
            why = why or judge.why
    return False, why


def time_of_day(node: Node, half: str = "") -> set[int]:
    """The seconds since midnight that `7`, `7:30`, `7:30:15` can mean in a half of the day ("am", "pm") or in none."""
    parts = node.parts if isinstance(node, Ratio) and node.clock else [node]
    if len(parts) > 3 or not all(isinstance(part, Num) and part.value.denominator == 1 for part in parts):
        return set()
    hour, minute, second = (int(part.value) for part in [*parts, Num(Fraction(0)), Num(Fraction(0))][:3])
    hours = {hour, hour % 12 + 12 * (half == "pm")} if half and hour <= 12 else {hour}
    return {3600 * hour + 60 * minute + second for hour in hours}


class Judge:
    """One verdict: `why` says, for people, what decided it."""

    def __init__(self, gold: Node, answer: Node):
        self.gold, self.answer = (
            settled(node, [SETTLING]) if tree.contents(node)[1] & BIG else node for node in (gold, answer)
        )
        self.budget = [BUDGET]  # the work left to this verdict
        self.forms = 0  # comparisons of sympy forms so far
        self.line = RealLine(self.budget)
        self.why = ""

    def no(self, why: str) -> bool:
        self.why = why  # the outermost reason is noted last
        return False

    def verdict(self) -> bool:
        try:
            return self.equal(self.gold, self.answer)
        except Undefined as error:
            return self.no(f"no value: {error}")

    # -- dispatch by kind

    def equal(self, a: Node, b: Node) -> bool:
        """Whether `b` states the answer `a`."""
        (a, condition), (b, other) = map(self.conditional, (a, b))
        if isinstance(condition, Rel) and isinstance(other, Rel):  # k pi, k in Z; n pi, n in Z
            letters = [rel.terms[0].name if isinstance(rel.terms[0], Sym) else "" for rel in (condition, other)]
            if all(letters) and letters[0] not in tree.symbols(b):
                b = tree.substitute(b, {letters[1]: Sym(letters[0])})
        elif isinstance(condition, Sym) and condition != other:  # one more than the gold answer's is fine
            return self.no("the condition differs")
        whole = a, b
        a, b = self.unwrapped(a), self.unwrapped(b)
        if isinstance(a, Quantity) and isinstance(b, Rel) or isinstance(a, Rel) and isinstance(b, Quantity):
            return self.relations(a, b)  # a unit behind a label counts, too
        if isinstance(a, Quantity) or isinstance(b, Quantity):
            return self.quantities(a, b)
        if (tree.contents(a)[1] | tree.contents(b)[1]) & PLUS_MINUS:
            a, b = self.spread(a), self.spread(b)
            for x, y, written in ((a, b, whole[1]), (b, a, whole[0])):
                if isinstance(x, Seq) and x.kind == "tuple" and isinstance(written, Op) and isinstance(y, Seq):
                    return self.no("a point is not plus or minus a value")
        if isinstance(a, Rel) and isinstance(b, Rel) and self.both_relations(a, b):
            return True
        if self.line.is_real_set(a) or self.line.is_real_set(b):
            sets = self.line.real_set(a), self.line.real_set(b)
            if isinstance(b, Op):  # {3} against {2, 3} cap {3, 4}
                sets = sets[0] or self.line.finite(whole[0]), sets[1]
            if isinstance(a, Op):
                sets = sets[0], sets[1] or self.line.finite(whole[1])
            if None not in sets:
                return self.sets_equal(*sets) or self.no("they are different sets of real numbers")
        if isinstance(a, Rel) or isinstance(b, Rel):
            return self.relations(a, b)
        builders = [isinstance(x, Op) and x.head == "builder" for x in (a, b)]
        if any(builders):
            return all(builders) and all(map(self.equal, a.args, b.args)) or self.no("different sets")
        if isinstance(a, Seq) or isinstance(b, Seq) or has_matrix(a) or has_matrix(b):
            for x, y in ((a, b), (b, a)):
                if (vector := in_unit_vectors(x)) is not None and isinstance(y, Sym | Op) and not has_matrix(y):
                    return self.scalars(vector, with_unit_i(y)) or self.no("another vector")
            return self.containers(a, b)
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            return self.ratios(a, b) or self.no("different ratios or times")
        if isinstance(a, Based) or isinstance(b, Based):
            return a == b or self.no("numerals with a base are compared as written")
        return self.scalars(a, b)

    def conditional(self, node: Node) -> tuple[Node, Node | None]:
        """A node and the condition under which it holds, if it names one (see `latex.qualifier`)."""
        return node.args if isinstance(node, Op) and node.head == "where" else (node, None)

    def unwrapped(self, node: Node) -> Node:
        """A container of one item is that item; alternatives that are equal (`1/2 or 0.5`) are one value."""
        while isinstance(node, Seq) and len(node.items) == 1 and node.kind != "tuple":
            node = node.items[0]
        if isinstance(node, Seq) and node.kind == "or" and len(node.items) < 4:
            if all(self.equal(node.items[0], item) for item in node.items[1:]):
                return node.items[0]
        return node

    # -- units

    def quantities(self, a: Node, b: Node) -> bool:
        a, b = (n if isinstance(n, Quantity) else tree.letter_quantity(n) or n for n in (a, b))  # 5 cm against 5m
        (a, unit_a), (b, unit_b) = ((n.value, n.unit) if isinstance(n, Quantity) else (n, None) for n in (a, b))
        halves = [unit.dims[0][0] if unit and unit.dims else "" for unit in (unit_a, unit_b)]
        if {"am", "pm"} & {*halves}:
            times = time_of_day(a, halves[0]), time_of_day(b, halves[1])
            shared = set.intersection(*times) if "" in halves else times[0] == times[1] != set()
            return bool(shared) or self.no("different times")
        if unit_a and unit_b and unit_a.conflicts(unit_b):
            return self.no("the units conflict")
        for unit, value, angle in ((unit_a, a, b), (unit_b, b, a)):
            dimension = unit.dims[0][0] if unit and unit.dims else ""
            if isinstance(angle, Op) and angle.head == "degree" and dimension in DIMENSIONS - {"celsius", "fahrenheit"}:
                return dimension == "radian" and self.scalars(value, Op("radians", angle.args)) or self.no("an angle")
        if unit_a and unit_b and (size := unit_a.converted(unit_b)) != 1:
            b = Op("*", (b, Num(size)))
        return self.equal(a, b)

    # -- plus-minus: one value for each choice of signs

    def spread(self, node: Node) -> Node:
        """`a pm b` as the list of its values. Signs are chosen independently, together where "mp" occurs."""
        if isinstance(node, Seq) and node.kind != "tuple":
            items = []
            for item in map(self.spread, node.items):
                items += item.items if isinstance(item, Seq) and item.kind == "list" else [item]
            return Seq(node.kind, items)
        heads = tree.contents(node)[1]
        if not heads & PLUS_MINUS:
            return node
        if isinstance(node, Op) and node.head in ("cup", "cap", "setminus"):
            return Op(node.head, tuple(map(self.spread, node.args)))
        if isinstance(node, Rel) and node.ops == ["in"]:
            return Rel([node.terms[0], self.spread(node.terms[1])], node.ops)
        if isinstance(node, Rel) and len(node.terms) == 2 and node.ops == ["="]:
            values = self.spread(node.terms[1])
            if isinstance(values, Seq):
                return Seq("list", [Rel([node.terms[0], value], ["="]) for value in values.items])
        count = tree.count_signs(node)
        if count > 4:
            raise Undefined("too many plus-minus signs")
        if "mp" in heads:
            return Seq("list", [tree.choose_signs(node, [sign], together=True) for sign in (1, -1)])
        variants = [[1 - 2 * (bits >> k & 1) for k in range(count)] for bits in range(2**count)]
        return Seq("list", [tree.choose_signs(node, signs, together=False) for signs in variants])

    # -- relations

    def relations(self, a: Node, b: Node) -> bool:
        if isinstance(a, Rel) and isinstance(b, Rel):
            return False
        rel, other, gold_first = (a, b, True) if isinstance(a, Rel) else (b, a, False)
        if (
            set(rel.ops) <= {"="}
            and isinstance(rel.terms[0], Seq)
            and isinstance(rel.terms[-1], Seq)
            and (isinstance(other, Seq) and other.kind == "list" and all(isinstance(i, Rel) for i in other.items))
        ):
            named = [Rel([x, y], ["="]) for x, y in zip(rel.terms[0].items, rel.terms[-1].items)]
            return self.equal(Seq("list", named), other)
        label, value = self.unlabel(rel)
        if value is None:
            return self.no("an equation or inequality is not a value")
        if label is not None and tree.is_letter_sum(label):
            if value == Num(Fraction(0)) or gold_first and tree.symbols(label) & {"x", "y", "z"}:
                return self.no("a line or a plane is not a value")
        if (
            rel.ops == ["in"]
            and isinstance(value, Seq)
            and isinstance(other, Seq)
            and value.kind == "tuple" != other.kind
        ):
            return self.no("an interval is not a list")
        return self.equal(value, other) if gold_first else self.equal(other, value)

    def unlabel(self, rel: Rel) -> tuple[Node | None, Node | None]:
        """(label, value) of `x = 5`, `5 = x`, `S = 2 * 3 = 6`, `x in {1, 2}`; (None, None) of an equation."""
        first, *rest = rel.terms
        if rel.ops == ["in"]:
            return first, rest[0]
        if set(rel.ops) != {"="}:
            return None, None
        if not tree.is_label(first):
            if len(rest) == 1 and tree.is_label(rest[0]) and tree.is_constant(first):
                return rest[0], first
            values = rel.terms
            label = None
            if not all(tree.is_constant(v) for v in values):
                return None, None
        else:
            values, label = rest, first
        if tree.is_constant_label(first) and label is not None and not tree.is_constant(values[-1]):
            return None, None
        constants = [v for v in values if tree.is_constant(v)]
        if not all(self.equal(v, constants[-1]) for v in constants[:-1]):
            raise Undefined("a chain of equalities contradicts itself")
        return label, values[-1]

    def both_relations(self, a: Rel, b: Rel) -> bool:
        found = tree.derivatives(a), tree.derivatives(b)
        if all(found):  # x' is dx/dt, x is x(t)
            variables = [{variable for _, _, variable in derivatives} - {""} for derivatives in found]
            if not all(variables) or variables[0] & variables[1]:
                functions = {name for name, _, _ in found[0] | found[1]}
                a, b = tree.primed(a, functions), tree.primed(b, functions)
        if set(a.ops) == set(b.ops) == {"="}:
            (label_a, value_a), (label_b, value_b) = self.unlabel(a), self.unlabel(b)
            if value_a is not None and value_b is not None and label_a is not None and label_b is not None:
                if tree.same_label(label_a, label_b) and self.equal(value_a, value_b):
                    return True
                renamed = tree.same_function(label_a, label_b)
                if renamed:
                    captured = {x.name for x in renamed.values()} & (tree.symbols(value_b) - set(renamed))  # f(m) = n
                    return not captured and self.equal(value_a, tree.substitute(value_b, renamed))
        if (
            a.ops == b.ops == ["==", "mod"]
            and self.equal(a.terms[0], b.terms[0])
            and self.equal(a.terms[2], b.terms[2])
        ):
            return self.congruent(a.terms[1], b.terms[1], a.terms[2])
        if a.ops == b.ops and len(a.terms) == len(b.terms) and all(map(self.equal, a.terms, b.terms)):
            return bool(set(a.ops) - {"="}) or self.is_equation(a)
        if [FLIPPED.get(op) for op in reversed(a.ops)] == b.ops and all(
            self.equal(x, y) for x, y in zip(reversed(a.terms), b.terms)
        ):
            return True
        if len(a.terms) == len(b.terms) == 2 and a.ops[0] in FLIPPED and b.ops[0] in FLIPPED:
            ratio = self.proportion(a, b)
            if ratio is not None:
                op = b.ops[0] if ratio > 0 else FLIPPED[b.ops[0]]
                return a.ops[0] == op or self.no("the inequalities point in different directions")
            if a.ops == b.ops == ["="] and self.cleared_of_fractions(a, b):
                return True
        return self.no("the relations are not multiples of each other")

    def congruent(self, x: Node, y: Node, modulus: Node) -> bool:
        """Whether two remainders are the same one: 3 and 10 modulo 7."""
        if all(tree.is_constant(node) for node in (x, y, modulus)):
            return self.scalars(Op("mod", (x, modulus)), Op("mod", (y, modulus)))
        return self.equal(x, y)

    def is_equation(self, rel: Rel) -> bool:
        """Whether an equality says something: `0 = 0` and `y = y` do not."""
        return not any(self.equal(x, y) for x, y in zip(rel.terms, rel.terms[1:]))

    # -- containers

    def containers(self, a: Node, b: Node) -> bool:
        if has_matrix(a) or has_matrix(b):
            return self.matrices(a, b)
        if isinstance(a, Seq) and isinstance(b, Seq):
            if a.kind == b.kind == "tuple":
                if a.ends != b.ends and len(a.items) == 2 or len(a.items) != len(b.items):
                    return self.no("tuples of different length, or different ends of an interval")
                return all(map(self.equal, a.items, b.items)) or self.no("an entry of the tuples differs")
            for x, y, flip in ((a, b, False), (b, a, True)):
                if x.kind == "tuple" and y.kind == "list" and all(isinstance(i, Rel) for i in y.items):
                    return self.named_entries(x, y, flip)
            if {a.kind, b.kind} == {"tuple", "list"} and len(a.items) == len(b.items):
                ends = (a.ends if a.kind == "tuple" else b.ends) + "∞" * any(map(tree.infinity, a.items))
                return (
                    ends == "()" and all(map(self.equal, a.items, b.items)) or self.no("another order, or an interval")
                )
            if "tuple" in (a.kind, b.kind):
                return self.no("a tuple is not a list or set")
            return self.unordered(a, b)
        return self.no("a list, set or tuple is not a single value")

    def named_entries(self, entries: Seq, named: Seq, flip: bool) -> bool:
        """`(15, -29)` against `x=15, y=-29`: the entries in alphabetical order of their names, or as written."""
        parts = [self.unlabel(rel) for rel in named.items]
        if len(parts) != len(entries.items) or any(label is None for label, _ in parts):
            return self.no("the named values are not the entries of the tuple")
        ordered = sorted(parts, key=lambda part: str(part[0]))
        letters = [ord(label.name[0]) if isinstance(label, Sym) else 0 for label, _ in ordered]
        orders = [[value for _, value in ordered]]
        if letters != list(range(letters[0], letters[0] + len(letters))):  # x, y, z have an order of their own
            orders.append([value for _, value in parts])
        for order in orders:
            pairs = zip(order, entries.items) if flip else zip(entries.items, order)
            if all(self.equal(x, y) for x, y in pairs):
                return True
        return self.no("an entry differs")

    def unordered(self, a: Seq, b: Seq) -> bool:
        left, right = list(a.items), list(b.items)
        if a.kind == "set" and b.kind == "set":
            left, right = self.distinct(left), self.distinct(right)
        if len(left) != len(right):
            return self.no(f"{len(left)} values against {len(right)}")
        if len(left) > MAX_ITEMS:
            raise Undefined("too many values")
        if "text otherwise" in set.union(*map(tree.symbols, left + right), set()):
            left, right = self.with_rest(left, right), self.with_rest(right, left)
        for item in left:
            match = next((at for at, other in enumerate(right) if self.equal(item, other)), None)
            if match is None:
                return self.no(f"nothing on the other side equals {tree.drawn(item)}")
            del right[match]
        return True

    def with_rest(self, cases: list, others: list) -> list:
        """The cases of a piecewise function with "otherwise" in place of a condition that it can stand for."""
        conditions = [case.items[-1] for case in cases if isinstance(case, Seq) and len(case.items) == 2]
        rest = Sym("text otherwise")
        if len(conditions) < len(cases) or rest in conditions:
            return cases
        for at, case in enumerate(cases):
            if self.is_rest(case.items[-1], conditions[:at] + conditions[at + 1 :]) and any(
                isinstance(other, Seq) and other.items[1:] == [rest] and self.equal(other.items[0], case.items[0])
                for other in others
            ):
                return [*cases[:at], Seq("tuple", [case.items[0], rest]), *cases[at + 1 :]]
        return cases

    def is_rest(self, condition: Node, others: list) -> bool:
        """Whether a condition holds exactly where none of the others does."""
        if isinstance(condition, Sym):
            swapped = [name.name.replace("even", "odd") for name in (condition, *others) if isinstance(name, Sym)]
            return len(others) == 1 and len(swapped) == 2 and swapped[0] == swapped[1] and condition != others[0]
        sets = [self.line.real_set(rel) if isinstance(rel, Rel) else None for rel in (condition, *others)]
        if None in sets:
            return False
        variable, pieces = sets[0]
        return self.sets_equal(
            (variable, pieces), (sets[-1][0], self.line.complement([p for _, some in sets[1:] for p in some]))
        )

    def distinct(self, items: list) -> list:
        out: list = []
        for item in items[:MAX_ITEMS]:
            if not any(self.equal(item, other) for other in out):
                out.append(item)
        return out + items[MAX_ITEMS:]

    def ratios(self, a: Node, b: Node) -> bool:
        """Equal part by part, or proportional; times as times; a gold ratio is the quotient of its two numbers."""
        if isinstance(a, Ratio) and len(a.parts) == 2 and a.clock < 2 and isinstance(b, Num | Op):
            return self.scalars(Op("/", tuple(a.parts)), b)
        if isinstance(a, Ratio) and isinstance(b, Ratio) and max(a.clock, b.clock) == 2:
            return bool(time_of_day(a) & time_of_day(b))
        if not isinstance(a, Ratio) or not isinstance(b, Ratio) or len(a.parts) != len(b.parts):
            return False
        if all(self.equal(x, y) for x, y in zip(a.parts, b.parts)):
            return True
        if any(isinstance(p, Op) and p.head == "..." for p in a.parts + b.parts):
            return False
        pairs = [(Op("*", (x, b.parts[0])), Op("*", (y, a.parts[0]))) for x, y in zip(a.parts[1:], b.parts[1:])]
        return all(self.equal(x, y) for x, y in pairs)

    # -- matrices

    def matrices(self, a: Node, b: Node) -> bool:
        rows = []
        for node in (a, b):
            if isinstance(node, Seq) and node.kind == "tuple" and node.ends in ("()", "[]"):
                nested = all(isinstance(row, Seq) and row.kind == "tuple" for row in node.items)  # [[1, 2], [3, 4]]
                node = Matrix([item.items if nested else [item] for item in node.items])
            rows.append(matrix_rows(node))
        if isinstance(a, Seq) or isinstance(b, Seq):  # a vector written as a tuple: row or column
            rows = [[[cell] for cell in r[0]] if r and len(r) == 1 else r for r in rows]
        if not all(rows) or [len(r) for r in rows[0]] != [len(r) for r in rows[1]]:
            return self.no("matrices of different shape")
        pairs = [(x, y) for left, right in zip(*rows) for x, y in zip(left, right)]
        return all(self.equal(x, y) for x, y in pairs) or self.no("an entry of the matrices differs")

    def sets_equal(self, a: tuple, b: tuple) -> bool:
        if a[0] and b[0] and a[0] != b[0]:
            return self.no("the inequalities are about different variables")
        a, b = self.line.union(a[1]), self.line.union(b[1])
        if len(a) != len(b):
            return False
        for (low_a, *closed_a, high_a, end_a), (low_b, *closed_b, high_b, end_b) in zip(a, b):
            if closed_a != closed_b or end_a != end_b:
                return False
            for x, y in ((low_a, low_b), (high_a, high_b)):
                if (x is None) != (y is None) or x is not None and not self.scalars(x, y):
                    return False
        return True

    # -- scalars

    def scalars(self, a: Node, b: Node) -> bool:
        """Whether two numbers or expressions are equal."""
        if not isinstance(a, Num | Sym | Op) or not isinstance(b, Num | Sym | Op):
            return self.no("one is a value, the other is not")
        if isinstance(a, Num) and isinstance(b, Num):
            return a.value == b.value or self.no("different rational numbers")
        if tree.infinity(a) or tree.infinity(b):
            return tree.infinity(a) == tree.infinity(b) or self.no("only one is infinite")
        percents = [isinstance(n, Op) and n.head == "percent" for n in (a, b)]
        if any(percents):
            return self.percents(a, b, percents)
        if self.same_value(a, b):
            return True
        for x, y in ((a, b), (b, a)):
            if "degree" in tree.contents(x)[1] and "degree" not in tree.contents(y)[1] and tree.contents(y)[1] & ANGLES:
                return self.same_value(in_radians(x), y)
        for x, y in ((a, b), (b, a)):  # 13 and 13 m
            if (stripped := tree.letter_quantity(y)) is not None and not tree.symbols(x):
                return self.same_value(x, stripped.value)
        return self.no("the values differ")

    def percents(self, a: Node, b: Node, percents: list[bool]) -> bool:
        if all(percents):
            return self.scalars(a.args[0], b.args[0])
        number, other = (a.args[0], b) if percents[0] else (b.args[0], a)
        if self.same_value(Op("percent", (number,)), other):
            return True
        at = Evaluator(0, False, self.budget)
        dropped = not tree.symbols(number) and abs(at.num(at.value(number))) >= 1 and self.same_value(number, other)
        return dropped or self.no("p% is p/100")

    def same_value(self, a: Node, b: Node) -> bool:
        """Whether two scalars are equal: by their values, and by their sympy forms where values do not tell."""
        if a == b:
            return True
        names, heads = map(set.union, tree.contents(a), tree.contents(b))
        if names or heads & OPAQUE:
            same, sure = self.at_random_points(a, b, heads)
        else:
            same, sure = self.constants(a, b)
        if sure:
            return bool(same)
        return bool(self.same_form(a, b))

    def constants(self, a: Node, b: Node) -> tuple[bool, bool]:
        """(whether two constants are equal, whether that is sure)."""
        at = Evaluator(0, False, self.budget)
        try:
            x, y = at.value(a), at.value(b)
        except Undefined as error:
            return self.no(f"no value: {error}"), True
        if close(at, x, y, a, b):
            same = self.shown(at, a, b) if at.may_hide_digits else True
            return same, same is not None
        return self.literal(at, x, y, a, b), True

    def shown(self, at: Evaluator, a: Node, b: Node) -> bool | None:
        """Whether two values are equal in so many digits that the smallest number met shows beside the largest; None if
        those would be too many."""
        digits = DIGITS + (at.largest - at.smallest) * 3 // 10
        if digits > MAX_DIGITS:
            return None
        finer = Evaluator(at.index, at.whole, self.budget, digits, dict(at.env))
        try:
            x, y = finer.value(a), finer.value(b)
        except Undefined:
            if self.budget[0] < 0:
                raise
            return None
        return abs(finer.num(x) - finer.num(y)) <= finer.ctx.mpf(2) ** at.smallest * finer.ctx.mpf(10) ** -NOISE

    def at_random_points(self, a: Node, b: Node, heads: set[str]) -> tuple[bool, bool]:
        """(whether two expressions are equal at random points, whether that is sure)."""
        heads_a, heads_b = tree.contents(a)[1], tree.contents(b)[1]
        whole = bool(heads & WHOLE) or tree.negative_base(a) or tree.negative_base(b)
        one_absolute = ("abs" in heads_a) != ("abs" in heads_b)
        variables = bound_variables(a), bound_variables(b)
        different = False, not all(variables) or variables[0] == variables[1]
        complex_allowed = "i" in heads
        good = complex_good = 0
        complex_bad = hidden = one_sided = False
        points = POINTS
        if whole and not heads & {"sum", "prod"}:
            points = WHOLE_POINTS if heads & STEPS else 2 * POINTS
        if complex_allowed and not whole:
            places = [(index, {}) for index in range(4)]  # branch cuts: explicit i, positive symbols only
        else:
            places = [*((index, {}) for index in range(points)), *turning_points(a, b)]
        for index, env in places:
            at = Evaluator(index, whole, self.budget, env=dict(env))
            (x, real_x), (y, real_y) = self.value(at, a), self.value(at, b)
            if x is None or y is None:
                one_sided = one_sided or x is not y
                continue
            same = close(at, x, y, a, b)
            if same and at.may_hide_digits:
                same = self.shown(at, a, b)
                hidden = hidden or same is None
                same = same is not False
            if one_absolute and real_x != real_y:  # ln|x| and ln x: an absolute value widens the domain
                return False, True
            if complex_allowed or real_x and real_y:
                if not same:
                    return different
                good += 1
            else:
                complex_good, complex_bad = complex_good + same, complex_bad or not same
        if good >= 2 or complex_good >= 2 and not complex_bad:
            return True, not hidden
        return False, complex_bad or one_sided

    def value(self, at: Evaluator, node: Node) -> tuple:
        """(value, whether it is real) at a point; (None, False) where there is none."""
        try:
            return at.value_and_real(node)
        except Undefined:
            if self.budget[0] < 0:
                raise
            return None, False

    def same_form(self, a: Node, b: Node) -> bool | None:
        """The verdict of sympy's canonical forms, asked at most `MAX_FORMS` times."""
        from nano_exgrpo.checker.sympy_form import same_form  # sympy takes a moment to import

        self.forms += 1
        return same_form(a, b) if self.forms <= MAX_FORMS else None

    def literal(self, at: Evaluator, x, y, a: Node, b: Node) -> bool:
        """A decimal literal of at least `LITERAL_DIGITS` digits against an exact value that it rounds to."""
        for node, other in ((a, b), (b, a)):
            if isinstance(node, Num) and node.digits >= LITERAL_DIGITS and not (isinstance(other, Num)):
                difference, size = abs(at.num(x) - at.num(y)), abs(at.num(node.value))
                unit = at.ctx.mpf(10) ** (int(at.ctx.floor(at.ctx.log10(size))) + 1 - node.digits)
                if difference <= unit:
                    return True
        return False

    # -- equations and inequalities

    def proportion(self, a: Rel, b: Rel):
        """The constant c != 0 with (left - right of a) = c (left - right of b), or None."""
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return None
        sides = difference(a), difference(b)
        names, heads = map(set.union, tree.contents(sides[0]), tree.contents(sides[1]))
        if not names and not heads & OPAQUE:
            return None
        ratios = []
        for index, env in [*((index, {}) for index in range(POINTS)), *turning_points(*sides)]:
            at = Evaluator(index, bool(heads & WHOLE), self.budget, env=dict(env))
            try:
                top, bottom = at.value(sides[0]), at.value(sides[1])
                if top == 0 or bottom == 0 or at.magnitude(top) < -3 * NOISE or at.magnitude(bottom) < -3 * NOISE:
                    return None
                ratios.append(divide(at, top, bottom))
                if at.may_hide_digits:
                    return None
            except Undefined:
                continue
        if len(ratios) < 3 or not all(close(at, r, ratios[0]) for r in ratios):
            return None
        ratio = at.num(ratios[0])
        return None if isinstance(ratio, at.ctx.mpc) else ratio

    def cleared_of_fractions(self, a: Rel, b: Rel) -> bool:
        """Whether one equation is the other times a factor that makes no new solution: `y = 1/x` and `xy = 1`.

        In each symbol the quotient of the two must be constant, a power or linear, so that its zero is known; there
        the equation with the extra factor must not hold, as `x(y - 1) = 0` does besides `y = 1`.
        """
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return False
        sides = named(difference(a)), named(difference(b))
        if tree.symbols(sides[0]) != tree.symbols(sides[1]):
            return False
        names = sorted(tree.symbols(sides[0]))
        return bool(names) and all(self.harmless_factor(sides, name, index) for name in names for index in range(3))

    def harmless_factor(self, sides: tuple[Op, Op], name: str, index: int) -> bool:
        """Whether the quotient of two expressions is constant in a symbol, or has a zero that is none of theirs."""
        at = Evaluator(index, False, self.budget)
        start = sample(name, index, False)
        quotients = []
        for multiple in (1, 2, 3):
            at.env[name] = multiple * start
            quotients.append(divide(at, at.value(sides[0]), at.value(sides[1])))
        if at.may_hide_digits:
            return False
        if not all(isinstance(q, Fraction) for q in quotients):
            start, *quotients = map(at.num, (start, *quotients))
        for extra, (q1, q2, q3) in ((sides[0], quotients), (sides[1], [divide(at, Fraction(1), q) for q in quotients])):
            if close(at, q1, q2) and close(at, q1, q3):
                return True
            if any(close(at, q2, 2**k * q1) and close(at, q3, 3**k * q1) for k in range(1, 5)):
                zero = Fraction(0)
            elif close(at, q2 - q1, q3 - q2):
                zero = start - start * q1 / (q2 - q1)
            else:
                continue
            at.env[name] = zero
            try:  # the zero may be rounded: so is the value there
                value = at.value(extra)
                return value != 0 and at.magnitude(value) > -2 * NOISE
            except Undefined:
                return self.budget[0] > 0
        return False


def difference(rel: Rel) -> Op:
    """Left side minus right side."""
    return Op("+", (rel.terms[0], Op("neg", (rel.terms[1],))))


def in_unit_vectors(node: Node) -> Node | None:
    """(a, b, c) as a i + b j + c k; None for what is no vector."""
    if isinstance(node, Matrix) and 1 in (len(node.rows), len(node.rows[0])):
        node = Seq("tuple", [cell for row in node.rows for cell in row])
    if not isinstance(node, Seq) or node.kind != "tuple" or node.ends != "()" or len(node.items) not in (2, 3):
        return None
    if not all(isinstance(item, Num | Sym | Op) for item in node.items):
        return None
    return Op("+", tuple(Op("*", pair) for pair in zip(node.items, (Sym("unit i"), Sym("j"), Sym("k")))))


def with_unit_i(node: Node) -> Node:
    """The tree with i as a vector, not as a number."""
    return Sym("unit i") if node == Op("i") else tree.rebuilt(node, with_unit_i)


def in_radians(node: Node) -> Node:
    """The tree with its degrees converted."""
    head = "radians" if isinstance(node, Op) and node.head == "degree" else ""
    return Op(head, node.args) if head else tree.rebuilt(node, in_radians)


def named(node: Node) -> Node:
    """The tree with a symbol for each x_1, f(2), integral, ...: unknowns like others where an equation is solved."""
    return Sym(tree.drawn(node)) if isinstance(node, Op) and node.head in OPAQUE else tree.rebuilt(node, named)


def bound_variables(node: Node) -> set[str]:
    """The names of the variables of sums, products, limits and integrals."""
    names = set().union(*map(bound_variables, tree.children(node)))
    if isinstance(node, Op) and node.head in BIG:
        low, _, body = node.args
        if isinstance(low, Rel):
            names |= tree.symbols(low.terms[0])
        elif isinstance(body, Op) and body.args and isinstance(body.args[-1], Sym):
            names.add(body.args[-1].name)  # dx
    return names


def turning_points(*trees: Node) -> list[tuple[int, dict[str, Fraction]]]:
    """Points at and beyond the numbers that occur in some trees, for one symbol at a time: where |x - 10| turns and
    floor(n / 2024) steps, which random points of size one never see."""
    names, heads = map(set.union, *map(tree.contents, trees)) if len(trees) > 1 else tree.contents(trees[0])
    if not heads & TURNS:
        return []
    sizes = sorted({abs(v) for node in trees for v in tree.literals(node) if 2 < abs(v) <= 10**6}, reverse=True)[
        :MAX_TURNS
    ]
    if heads & WHOLE:
        values = [v for size in sizes if size.denominator == 1 for v in (size, size + 1, 2 * size + 1)]
    else:
        values = [v for size in sizes for v in (size + 1, 3 * size, -size - 1, -3 * size)]
    return [(at % POINTS, {name: value}) for name in sorted(names)[:MAX_TURNS] for at, value in enumerate(values)]


def has_matrix(node: Node) -> bool:
    """Whether a tree is a matrix or an arithmetic expression with one."""
    if isinstance(node, Op):
        return node.head in ("+", "*", "/", "neg", "^") and any(map(has_matrix, node.args))
    return isinstance(node, Matrix)


def matrix_rows(node: Node) -> list[list] | None:
    """The entries of a matrix expression; None for a scalar."""
    if isinstance(node, Matrix):
        return node.rows if len(node.rows) * len(node.rows[0]) <= MAX_ENTRIES else None
    if not isinstance(node, Op) or not has_matrix(node):
        return None
    parts = [matrix_rows(arg) for arg in node.args]
    head, args = node.head, node.args
    if head == "neg":
        return [[Op("neg", (cell,)) for cell in row] for row in parts[0]]
    if head == "+" and all(parts) and len({(len(p), len(p[0])) for p in parts}) == 1:
        return [[Op("+", cells) for cells in zip(*rows)] for rows in zip(*parts)]
    if head == "/" and parts[0] and not parts[1]:
        return [[Op("/", (cell, args[1])) for cell in row] for row in parts[0]]
    if head == "*":
        scalars = tuple(arg for arg, part in zip(args, parts) if part is None)
        matrices = [part for part in parts if part]
        if len(matrices) == 1:
            return [[Op("*", (*scalars, cell)) for cell in row] for row in matrices[0]]
        if len(matrices) == 2 and not scalars and len(matrices[0][0]) == len(matrices[1]):
            columns = list(zip(*matrices[1]))
            return [
                [Op("+", tuple(Op("*", pair) for pair in zip(row, column))) for column in columns]
                for row in matrices[0]
            ]
    if head == "^" and parts[0] and args[1] in tree.TRANSPOSED:
        return [list(column) for column in zip(*parts[0])]
    if head == "^" and parts[0] and isinstance(args[1], Num) and 2 <= args[1].value <= 4 and len(parts[0]) <= 3:
        return matrix_rows(
            Op("*", (args[0], Op("^", (args[0], Num(args[1].value - 1))) if args[1].value > 2 else args[0]))
        )
    return None
