"""A suffix automaton in plain Python, an oracle for match lengths (SAM-Decoding, arXiv 2411.10666; the cards, A2)."""

from __future__ import annotations


class SuffixAutomaton:
    """The text so far, and how much of its end occurs earlier.

    After `feed`, `match` is the longest suffix of the text that ends earlier too, and `end` where (the number of tokens
    up to its end) it first did.
    """

    def __init__(self):
        self.next, self.link, self.length, self.end_of = [{}], [-1], [0], [0]
        self.text, self.last = [], 0
        self.state, self.match = 0, 0

    def feed(self, token) -> None:
        """Commit a token: match it against what came before, then add it."""
        self.state, self.match = self.transfer(self.state, self.match, token)
        self.extend(token)

    @property
    def end(self) -> int:
        return self.end_of[self.state]

    def transfer(self, state, match, token):
        while state and token not in self.next[state]:
            state = self.link[state]
            match = self.length[state]
        return (self.next[state][token], match + 1) if token in self.next[state] else (0, 0)

    def extend(self, token) -> None:
        self.text.append(token)
        new = self._add({}, -1, len(self.text), len(self.text))
        p = self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token] = new
            p = self.link[p]
        self.link[new] = 0 if p < 0 else self._class_after(p, token)
        self.last = new

    def _class_after(self, p, token):
        """The state of the longest suffix that goes on from p, split off from a longer one if need be."""
        q = self.next[p][token]
        if self.length[p] + 1 == self.length[q]:
            return q
        clone = self._add(dict(self.next[q]), self.link[q], self.length[p] + 1, self.end_of[q])
        while p >= 0 and self.next[p].get(token) == q:
            self.next[p][token] = clone
            p = self.link[p]
        self.link[q] = clone
        return clone

    def _add(self, edges, link, length, end):
        self.next.append(edges)
        self.link.append(link)
        self.length.append(length)
        self.end_of.append(end)
        return len(self.next) - 1
