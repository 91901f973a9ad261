"""Which KV pages hold which tokens: a tree of prefixes, so that what is computed once is not computed again.

Every node but the root stands for a run of whole pages: their tokens, and the pages that hold the KV of these tokens
*after the tokens of all nodes above*. Children of a node differ in their first page of tokens: a prefix has one path.
A path may end in the middle of a node only when it is matched; the node is then split there, at a page boundary.

    root ──[system prompt: pages 7 3 9]──┬──[question A: 4 5]
                                         └──[question B: 8]──[turn 2: 1 6]

Pages in the tree belong to it alone. A request *locks* the node where its own prefix ends, which keeps everything from
there to the root; unlocked pages stay until they are wanted for something else. ``evict`` takes leaves, least recently
used first, from their far end: what is left is always a prefix that can be matched.

Source: RadixAttention (Zheng et al., SGLang, NeurIPS 2024), with whole pages instead of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Node:
    """A run of cached pages. ``tokens`` are those of its own pages; ``num_locks`` counts requests at or below it."""

    __slots__ = ("children", "last_used", "num_locks", "pages", "parent", "tokens")

    def __init__(self, tokens: Ints, pages: Ints, parent: Node | None):
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.last_used = 0


class RadixCache:
    """A tree over pages of ``page_size`` tokens. It gives pages back and never takes any by itself."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Forget everything, locked or not; the pages are then nobody's."""
        nothing = np.empty(0, dtype=np.int64)
        self.root = Node(nothing, nothing, None)
        self.num_pages = 0
        self.num_locked_pages = 0
        self._clock = 0
        self._num_nodes = 0
        # Unlocked leaves by last use. Entries are never removed early: one that no longer holds is skipped when popped.
        self._leaves: list[tuple[int, int, Node]] = []
        self._num_pushed = 0

    @property
    def evictable_pages(self) -> int:
        """Pages that no request needs."""
        return self.num_pages - self.num_locked_pages

    def match(self, tokens: Ints) -> Node:
        """The node where the longest cached prefix of ``tokens`` ends, the root if there is none; it is now in use.

        Lock it before anything else is done with the tree, or it may be evicted.
        """
        self._clock += 1
        node, at = self.root, 0
        while (child := self._child(node, tokens[at:])) is not None:
            num_pages = self._num_common_pages(child, tokens[at:])
            if num_pages < len(child.pages):
                child = self._split(child, num_pages)
            child.last_used = self._clock
            node, at = child, at + num_pages * self.page_size
        self._offer(node)
        return node

    def peek(self, tokens: Ints) -> tuple[Node, int]:
        """As ``match``, but changing nothing: the node in or at whose end the prefix ends, and the prefix's length."""
        node, at = self.root, 0
        while (child := self._child(node, tokens[at:])) is not None:
            num_pages = self._num_common_pages(child, tokens[at:])
            node, at = child, at + num_pages * self.page_size
            if num_pages < len(child.pages):
                break
        return node, at

    def pages_to(self, node: Node) -> Ints:
        """The pages from the root to the end of this node, in order."""
        parts: list[Ints] = []
        here: Node | None = node
        while here is not None:
            parts.append(here.pages)
            here = here.parent
        return np.concatenate(parts[::-1])

    def extend(self, node: Node, tokens: Ints, pages: Ints) -> tuple[Node, Ints]:
        """Add pages that continue the prefix which ends at ``node``; the new end, and the pages that were there before.

        ``tokens`` fill ``pages``. Of those that are cached already, say k, the caller keeps its first k pages, and is
        given the k pages of the tree; the others are the tree's from now on.
        """
        assert len(tokens) == len(pages) * self.page_size, f"{len(tokens)} tokens in {len(pages)} pages"
        self._clock += 1
        present: list[Ints] = []
        at = 0
        while (child := self._child(node, tokens[at * self.page_size :])) is not None:
            num_pages = self._num_common_pages(child, tokens[at * self.page_size :])
            if num_pages < len(child.pages):
                child = self._split(child, num_pages)
            child.last_used = self._clock
            present.append(child.pages)
            node, at = child, at + num_pages
        if at < len(pages):
            own = Node(tokens[at * self.page_size :].copy(), pages[at:].copy(), node)
            own.last_used = self._clock
            node.children[self._key(own.tokens)] = own
            self.num_pages += len(own.pages)
            self._num_nodes += 1
            node = own
        self._offer(node)
        return node, np.concatenate(present) if present else np.empty(0, dtype=np.int64)

    def lock(self, node: Node) -> None:
        """Keep the pages from the root to this node until ``unlock``."""
        here: Node | None = node
        while here is not None:
            if here.num_locks == 0:
                self.num_locked_pages += len(here.pages)
            here.num_locks += 1
            here = here.parent

    def unlock(self, node: Node) -> None:
        """Take back one ``lock``."""
        here: Node | None = node
        while here is not None:
            assert here.num_locks > 0, "unlocked more often than locked"
            here.num_locks -= 1
            if here.num_locks == 0:
                self.num_locked_pages -= len(here.pages)
                self._offer(here)
            here = here.parent

    def evict(self, num_pages: int) -> Ints:
        """Take up to ``num_pages`` unlocked pages out, least recently used first; they are the caller's."""
        taken: list[Ints] = []
        missing = num_pages
        while missing > 0 and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if node.num_locks or node.children or stamp != node.last_used or parent is None:
                continue
            keep = max(len(node.pages) - missing, 0)
            taken.append(node.pages[keep:])
            missing -= len(node.pages) - keep
            if keep:
                node.pages, node.tokens = node.pages[:keep].copy(), node.tokens[: keep * self.page_size].copy()
                self._offer(node)
            else:
                del parent.children[self._key(node.tokens)]
                node.parent = None  # marks it as gone for its other entries
                self._num_nodes -= 1
                self._offer(parent)
        self.num_pages -= num_pages - missing
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def _key(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _child(self, node: Node, tokens: Ints) -> Node | None:
        return node.children.get(self._key(tokens)) if len(tokens) >= self.page_size else None

    def _num_common_pages(self, node: Node, tokens: Ints) -> int:
        length = min(len(node.tokens), len(tokens))
        differ = np.flatnonzero(node.tokens[:length] != tokens[:length])
        return (int(differ[0]) if len(differ) else length) // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut a node in two; the new one is the front. ``node`` remains the far end, which is where it was locked."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        at = num_pages * self.page_size
        front = Node(node.tokens[:at].copy(), node.pages[:num_pages].copy(), node.parent)
        front.num_locks, front.last_used = node.num_locks, node.last_used
        node.parent.children[self._key(front.tokens)] = front
        node.tokens, node.pages, node.parent = node.tokens[at:].copy(), node.pages[num_pages:].copy(), front
        front.children[self._key(node.tokens)] = node
        self._num_nodes += 1
        return front

    def _offer(self, node: Node) -> None:
        """Note a node that may be evicted now: to be called whenever one has become so, or was used again."""
        if node.num_locks or node.children or node.parent is None:
            return
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [
                (leaf.last_used, number, leaf)
                for number, leaf in enumerate(self.nodes())
                if not leaf.num_locks and not leaf.children
            ]
            heapq.heapify(self._leaves)
