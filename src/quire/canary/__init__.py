"""The canary: cached pages on the device are looked at again, within a share of the engine's time.

writes         which request wrote each slot last, and in which step
chain          what a page is: its namespace, tokens and position, in 64 bits
digest         what a page has: its bytes on the device, in 64 bits
stamps         which pages have a stamp, and whether it is still that of the same frame
canary         what is looked at next, and what was found
containment    damaged pages leave the cache, and their frames are quarantined
"""

from quire.canary.canary import Canary as Canary
