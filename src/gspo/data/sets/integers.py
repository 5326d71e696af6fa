"""60 problems with integer answers from 15 templates; each answer is found in two unrelated ways that must agree.

The first way is a formula, the second a plain search or count over everything that the question speaks of: the proof of
the key.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.seeding import derive_seed

PER_TEMPLATE = 4


@dataclass(frozen=True)
class Draft:
    """A question, the answer by formula, and the answer by search."""

    question: str
    formula: int
    search: Callable[[], int]


def make(seed: int) -> list[dict[str, Any]]:
    """Rows with ``id``, ``template``, ``prompt`` and ``answer`` (text of an integer); no question occurs twice."""
    rows = []
    for name, template in TEMPLATES.items():
        rng = random.Random(derive_seed(seed, "integers", name))
        drafts: dict[str, Draft] = {}
        while len(drafts) < PER_TEMPLATE:
            draft = template(rng)
            drafts.setdefault(draft.question, draft)
        for index, draft in enumerate(drafts.values()):
            found = draft.search()
            if found != draft.formula:
                raise AssertionError(f"{name}: the formula gives {draft.formula}, the search {found}: {draft.question}")
            prompt = f"{draft.question} Put your final answer, an integer, in \\boxed{{}}."
            rows.append({"id": f"integers/{name}/{index}", "template": name, "prompt": prompt, "answer": str(found)})
    return rows


def _power(rng: random.Random) -> Draft:
    base, exponent, modulus = rng.randint(3, 40), rng.randint(50, 400), rng.randint(11, 999)

    def search() -> int:
        value = 1
        for _ in range(exponent):
            value = value * base % modulus
        return value

    question = f"What is the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$?"
    return Draft(question, pow(base, exponent, modulus), search)


def _multiples(rng: random.Random) -> Draft:
    a, b, c = rng.sample(range(2, 16), 3)
    limit = rng.randint(300, 1000)

    def count(*divisors: int) -> int:
        return limit // math.lcm(*divisors)

    formula = count(a) + count(b) - count(a, b) - (count(a, c) + count(b, c) - count(a, b, c))
    question = f"How many positive integers up to ${limit}$ are multiples of ${a}$ or of ${b}$, but not of ${c}$?"
    return Draft(question, formula, lambda: sum((x % a == 0 or x % b == 0) and x % c > 0 for x in range(1, limit + 1)))


def _paths(rng: random.Random) -> Draft:
    width, height = rng.randint(4, 7), rng.randint(4, 7)
    x, y = rng.randint(1, width - 1), rng.randint(1, height - 1)
    formula = math.comb(width + height, width) - math.comb(x + y, x) * math.comb(width - x + height - y, width - x)

    def search() -> int:
        paths = {(0, 0): 1}
        for i, j in itertools.product(range(width + 1), range(height + 1)):
            if (i, j) != (0, 0):
                paths[i, j] = 0 if (i, j) == (x, y) else paths.get((i - 1, j), 0) + paths.get((i, j - 1), 0)
        return paths[width, height]

    question = (
        f"A path goes from $(0,0)$ to $({width},{height})$ in steps of one unit to the right or up. "
        f"How many such paths do not pass through $({x},{y})$?"
    )
    return Draft(question, formula, search)


def _divisors(rng: random.Random) -> Draft:
    powers = dict(zip(rng.sample((2, 3, 5, 7), 3), (rng.randint(1, 4) for _ in range(3)), strict=True))
    number = math.prod(prime**power for prime, power in powers.items())
    formula = math.prod(power + 1 for power in powers.values())
    question = f"How many positive divisors does ${number}$ have?"
    return Draft(question, formula, lambda: sum(number % x == 0 for x in range(1, number + 1)))


def _progression(rng: random.Random) -> Draft:
    first, step, terms = rng.randint(-50, 50), rng.randint(2, 19), rng.randint(20, 80)
    formula = terms * (2 * first + (terms - 1) * step) // 2
    starts = f"${first}, {first + step}, \\ldots$"
    question = f"An arithmetic progression starts {starts} What is the sum of its first ${terms}$ terms?"
    return Draft(question, formula, lambda: sum(first + step * k for k in range(terms)))


def _congruences(rng: random.Random) -> Draft:
    moduli = rng.sample((7, 9, 10, 11, 13, 17), 2)
    while math.gcd(*moduli) > 1:
        moduli = rng.sample((7, 9, 10, 11, 13, 17), 2)
    (m, n), (a, b) = moduli, [rng.randrange(1, modulus) for modulus in moduli]
    formula = (a * n * pow(n, -1, m) + b * m * pow(m, -1, n)) % (m * n)
    question = (
        f"What is the smallest positive integer that leaves remainder ${a}$ when divided by ${m}$ and remainder ${b}$ "
        f"when divided by ${n}$?"
    )
    return Draft(question, formula, lambda: next(x for x in itertools.count(1) if x % m == a and x % n == b))


def _capped_sums(rng: random.Random) -> Draft:
    total, cap, parts = rng.randint(8, 16), rng.randint(5, 8), rng.randint(3, 4)
    formula = sum(
        (-1) ** k * math.comb(parts, k) * math.comb(total - k * (cap + 1) + parts - 1, parts - 1)
        for k in range(parts + 1)
        if total >= k * (cap + 1)
    )
    names = ", ".join(f"x_{k}" for k in range(1, parts + 1))
    plus = " + ".join(f"x_{k}" for k in range(1, parts + 1))
    question = f"How many solutions in integers $0 \\le {names} \\le {cap}$ does ${plus} = {total}$ have?"
    every = range(cap + 1)
    return Draft(question, formula, lambda: sum(sum(x) == total for x in itertools.product(every, repeat=parts)))


def _trailing_zeros(rng: random.Random) -> Draft:
    n = rng.randint(60, 700)
    formula = sum(n // 5**k for k in range(1, 6))

    def search() -> int:
        digits = str(math.factorial(n))
        return len(digits) - len(digits.rstrip("0"))

    return Draft(f"With how many zeros does ${n}!$ end in base ten?", formula, search)


def _digit_sums(rng: random.Random) -> Draft:
    digits, total = rng.randint(3, 4), rng.randint(6, 20)
    free = total - 1  # the first digit is at least 1 and at most 9, the others at most 9

    def ways(amount: int, caps: tuple[int, ...]) -> int:
        return sum(
            (-1) ** len(chosen) * math.comb(left + len(caps) - 1, len(caps) - 1)
            for size in range(len(caps) + 1)
            for chosen in itertools.combinations(caps, size)
            if (left := amount - sum(cap + 1 for cap in chosen)) >= 0
        )

    question = f"How many {('three', 'four')[digits - 3]}-digit positive integers have digit sum ${total}$?"
    low = 10 ** (digits - 1)
    return Draft(
        question,
        ways(free, (8,) + (9,) * (digits - 1)),
        lambda: sum(sum(map(int, str(x))) == total for x in range(low, 10 * low)),
    )


def _recurrence(rng: random.Random) -> Draft:
    p, q, modulus, index = rng.randint(1, 5), rng.randint(1, 5), rng.randint(50, 997), rng.randint(30, 90)
    a, b = rng.randint(0, 9), rng.randint(1, 9)

    def times(left: list[int], right: list[int]) -> list[int]:
        (c, d, e, f), (g, h, i, j) = left, right
        return [x % modulus for x in (c * g + d * i, c * h + d * j, e * g + f * i, e * h + f * j)]

    power, base, rest = [1, 0, 0, 1], [p, q, 1, 0], index
    while rest:
        power, base, rest = times(power, base) if rest % 2 else power, times(base, base), rest // 2

    def search() -> int:
        x, y = a, b
        for _ in range(index):
            x, y = y, p * y + q * x
        return x % modulus

    question = (
        f"A sequence has $a_0 = {a}$, $a_1 = {b}$ and $a_n = {p} a_{{n-1}} + {q} a_{{n-2}}$ for $n \\ge 2$. "
        f"What is the remainder when $a_{{{index}}}$ is divided by ${modulus}$?"
    )
    return Draft(question, (power[2] * b + power[3] * a) % modulus, search)


def _triangles(rng: random.Random) -> Draft:
    perimeter = rng.randint(15, 60)
    shifted = perimeter + 3 if perimeter % 2 else perimeter
    formula = (shifted * shifted + 24) // 48  # the integer nearest to shifted^2 / 48

    def search() -> int:
        sides = range(1, perimeter)
        return sum(a <= b <= perimeter - a - b < a + b for a in sides for b in sides)

    question = f"How many triangles with integer sides have perimeter ${perimeter}$, congruent ones counted once?"
    return Draft(question, formula, search)


def _floor_sum(rng: random.Random) -> Draft:
    n = rng.randint(60, 400)
    root = math.isqrt(n)
    formula = 2 * sum(n // k for k in range(1, root + 1)) - root * root
    question = f"What is $\\sum_{{k=1}}^{{{n}}} \\lfloor {n}/k \\rfloor$?"
    return Draft(question, formula, lambda: sum(n // k for k in range(1, n + 1)))


def _roots(rng: random.Random) -> Draft:
    a, b, c = sorted(rng.sample(range(-12, 13), 3))
    s, t, u = a + b + c, a * b + b * c + c * a, a * b * c
    question = (
        f"The polynomial $x^3 {-s:+d}x^2 {t:+d}x {-u:+d}$ has three distinct integer roots. "
        "What is the sum of their squares?"
    )
    return Draft(question, s * s - 2 * t, lambda: sum(x * x for x in range(-99, 100) if x**3 - s * x * x + t * x == u))


def _lattice_triangle(rng: random.Random) -> Draft:
    width, height, top = rng.randint(5, 20), rng.randint(4, 20), rng.randint(0, 12)
    corners = [(0, 0), (width, 0), (top, height)]
    edges = list(zip(corners, corners[1:] + corners[:1], strict=True))
    boundary = sum(math.gcd(abs(x - v), abs(y - w)) for (x, y), (v, w) in edges)
    formula = (width * height - boundary + 2) // 2  # Pick: 2 * area = 2 * inside + boundary - 2

    def inside(x: int, y: int) -> bool:
        return all((r - p) * (y - q) - (s - q) * (x - p) > 0 for (p, q), (r, s) in edges)

    question = (
        "How many points with integer coordinates lie strictly inside the triangle with corners $(0,0)$, "
        f"$({width},0)$ and $({top},{height})$?"
    )
    points = list(itertools.product(range(max(width, top) + 1), range(height + 1)))
    return Draft(question, formula, lambda: sum(inside(x, y) for x, y in points))


def _fixed_points(rng: random.Random) -> Draft:
    n = rng.randint(5, 8)
    k = rng.randint(0, 3)
    derangements = [1, 0]
    for size in range(2, n + 1):
        derangements.append((size - 1) * (derangements[-1] + derangements[-2]))

    def search() -> int:
        return sum(sum(i == x for i, x in enumerate(p)) == k for p in itertools.permutations(range(n)))

    fixed = "no fixed point" if k == 0 else "exactly one fixed point" if k == 1 else f"exactly ${k}$ fixed points"
    return Draft(f"How many permutations of ${n}$ objects have {fixed}?", math.comb(n, k) * derangements[n - k], search)


TEMPLATES: dict[str, Callable[[random.Random], Draft]] = {
    "power": _power,
    "multiples": _multiples,
    "paths": _paths,
    "divisors": _divisors,
    "progression": _progression,
    "congruences": _congruences,
    "capped_sums": _capped_sums,
    "trailing_zeros": _trailing_zeros,
    "digit_sums": _digit_sums,
    "recurrence": _recurrence,
    "triangles": _triangles,
    "floor_sum": _floor_sum,
    "roots": _roots,
    "lattice_triangle": _lattice_triangle,
    "fixed_points": _fixed_points,
}
