"""How many drafts a round has: as many as pay, by how often drafts at each place survive and what rounds take.

The text does not depend on it, so the choice may follow measured time.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

PRIORS = (0.54, 0.16, 0.08, 0.04, 0.02, 0.01, *(0.01 / 2**i for i in range(1, 10)))  # survival by place, before data
FAST, SLOW = 0.375, 0.125  # weight of a new observation in the two means of survival
TRUST = 4  # observations until the prior no longer counts, and until a time is believed
STALE = 4  # rounds without an observation after which an estimate follows its left neighbour
COST = 0.125  # weight of a new time in the mean
SHAPE = (1.0, 1.075, 1.064, *(1.125 + 0.0535 * i for i in range(13)))  # relative times of widths not yet tried
GAIN = 1.01  # what another width must promise
WINS = 4  # rounds in a row that it must be the best
RESIDENCE = 3  # rounds that a width is kept at least
PROBE = 32  # rounds after which a wider one is tried if the drafts at the end keep surviving


@define
class Survival:
    """Of one sequence's drafts: the chance that the first i + 1 of a round are all kept, i from 0."""

    fast: list[float] = field(factory=lambda: list(PRIORS))
    slow: list[float] = field(factory=lambda: list(PRIORS))
    num_seen: list[int] = field(factory=lambda: [0] * len(PRIORS))
    streak: list[int] = field(factory=lambda: [0] * len(PRIORS))
    num_stale: list[int] = field(factory=lambda: [0] * len(PRIORS))

    def note(self, num_drafts: int, num_accepted: int) -> None:
        for i in range(len(PRIORS)):
            if i >= num_drafts:
                self.num_stale[i] += 1
                continue
            hit = num_accepted > i
            self.fast[i] += FAST * (hit - self.fast[i])
            self.slow[i] += SLOW * (hit - self.slow[i])
            self.num_seen[i] += 1
            self.streak[i] = self.streak[i] + 1 if hit else 0
            self.num_stale[i] = 0

    def chances(self) -> list[float]:
        """Falling from place to place."""
        found: list[float] = []
        before = 1.0
        for i, prior in enumerate(PRIORS):
            seen = 0.75 * self.fast[i] + 0.25 * self.slow[i]
            chance = prior + min(1.0, self.num_seen[i] / TRUST) * (seen - prior)
            if i and (not self.num_seen[i] or self.num_stale[i] >= STALE):
                chance = max(chance, before * (0.85 if self.streak[i - 1] >= 2 else 0.6))
            before = min(max(chance, 0.0), before)
            found.append(before)
        return found

    def expected(self, width: int) -> float:
        """Tokens of a round with so many drafts."""
        return 1 + sum(self.chances()[:width])


@define
class AdaptiveWidth:
    """The width of the next round, for all its sequences.   most: drafts at most."""

    most: int
    width: int = field(init=False)
    _seconds: dict[tuple[int, int], float] = field(factory=dict)  # mean by (sequences, width)
    _num_timed: dict[tuple[int, int], int] = field(factory=dict)
    _candidate: int = -1
    _wins: int = 0
    _age: int = 0  # rounds at this width
    _last_run: dict[int, int] = field(factory=dict)  # by width: the round it was run last
    _round: int = 0

    def __attrs_post_init__(self) -> None:
        self.width = min(3, self.most)

    def observe(self, num_seqs: int, width: int, seconds: float) -> None:
        """A round of that width took so long, drafting included."""
        key = num_seqs, width
        old = self._seconds.get(key, seconds)
        self._seconds[key] = old + COST * (seconds - old)
        self._num_timed[key] = self._num_timed.get(key, 0) + 1
        self._last_run[width] = self._round

    def cost(self, num_seqs: int, width: int) -> float:
        """Seconds, or for want of any measurement their relative shape."""
        key = num_seqs, width
        if self._num_timed.get(key, 0) >= TRUST:
            return self._seconds[key]
        timed = {w: n for (s, w), n in self._num_timed.items() if s == num_seqs and n >= TRUST}
        if not timed:
            return SHAPE[width]
        known = max(timed, key=lambda w: timed[w])
        return self._seconds[num_seqs, known] * SHAPE[width] / SHAPE[known]

    def choose(self, survivals: Sequence[Survival]) -> int:
        """Once for each round."""
        self._round += 1
        self._age += 1
        if not survivals:
            return self.width
        scores = {
            w: sum(s.expected(w) for s in survivals) / self.cost(len(survivals), w)
            for w in range(min(self.width + 1, self.most) + 1)
        }
        best = max(scores, key=lambda w: (scores[w], -w))
        if self._should_probe(survivals):
            best, needed = min(self.width + 2, self.most), 1
        else:
            needed = WINS
            if scores[best] < GAIN * scores[self.width]:
                best = self.width
        if best == self.width:
            self._candidate, self._wins = -1, 0
            return self.width
        self._wins = self._wins + 1 if best == self._candidate else 1
        self._candidate = best
        if self._wins >= needed and self._age >= RESIDENCE:
            self.width, self._age, self._candidate, self._wins = best, 0, -1, 0
        return self.width

    def _should_probe(self, survivals: Sequence[Survival]) -> bool:
        """The drafts at the end keep surviving, or there are none: a wider round was not run for long."""
        wider = min(self.width + 2, self.most)
        if wider == self.width or self._round - self._last_run.get(wider, -PROBE) < PROBE or self._age < PROBE // 2:
            return False
        return self.width == 0 or all(s.streak[self.width - 1] >= 6 for s in survivals)
