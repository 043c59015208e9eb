"""The allocators by hand: which pages are free, which are out, and the arithmetic of tokens, slots and pages.

slot = page * page_size + offset        page 0 is never handed out: padded tokens write there
"""

import numpy as np

from quire import InvalidFree, OutOfPages
from quire.memory.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator


def show(what: str, ids: np.ndarray) -> None:
    print(f"  {what:<44} {ids.tolist()}")


print("Pages of 4 tokens, 8 of them")
paged = PagedTokenToKVPoolAllocator(32, 4)
first = paged.alloc_extend([0], [6], [-1])  # a sequence of 6 tokens: ceil(6 / 4) = 2 pages, the second half full
show("0 -> 6 tokens takes pages 1 and 2:", first)

# Two sequences grow in one call. The first continues the half-full page; the second starts on a page of its own.
#   new pages = (ceil(13 / 4) - ceil(6 / 4)) + (ceil(3 / 4) - 0) = 2 + 1
grown = paged.alloc_extend([6, 0], [13, 3], [int(first[-1]), -1])
show("6 -> 13 fills page 2, then 3 and part of 4:", grown[:7])
show("0 -> 3 takes page 5:", grown[7:])

# One more token for each: only a sequence that crosses a boundary (length % 4 == 1 after the token) costs a page.
decoded = paged.alloc_extend([13, 3], [14, 4], [int(grown[6]), int(grown[9])])
show("decode, no boundary crossed, no page taken:", decoded)
decoded = paged.alloc_extend([14, 4], [15, 5], decoded)
show("decode, the second crosses and takes page 6:", decoded)
print(f"  available: {paged.available_size()} tokens in {paged.num_free_pages} whole pages")

print("Failure changes nothing")
try:
    paged.alloc(12)
except OutOfPages as error:
    print(f"  {error}")
print(f"  available: {paged.available_size()} tokens, as before")

print("Freeing any slot of a page frees the page; freed pages come first, in ascending order")
paged.free(grown[7:])  # three slots of page 5: the page goes back whole
paged.free(np.concatenate((first, grown[:7])))  # pages 1, 2, 3 and 4
show("the next 3 pages:", paged.alloc_pages(3))
try:
    paged.free_pages(np.array([5], dtype=np.int32))
except InvalidFree as error:
    print(f"  {error}")

print("Pages of 1 token: freed slots come last")
token = TokenToKVPoolAllocator(6)
out = token.alloc(3)
token.free(out[:2])
show("alloc 3 gave 1 2 3; after freeing 1 and 2:", token.alloc(4))

print("With need_sort, freed pages wait and come back in ascending order when they are needed")
ordered = TokenToKVPoolAllocator(6, need_sort=True)
out = ordered.alloc(6)
ordered.free(out[[4, 1, 3]])
show("alloc 6, free 5 2 4, alloc 3:", ordered.alloc(3))

print("Several frees in one: inside a group pages are neither out nor available")
paged.clear()
pages = paged.alloc_pages(8)
paged.free_group_begin()
for page in (7, 3, 5):
    paged.free_pages(np.array([page], dtype=np.int32))
print(f"  inside: {paged.num_free_pages} free")
paged.free_group_end()
show("after the group:", paged.alloc_pages(3))
