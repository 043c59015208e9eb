"""The text that errors are measured on where no other is given: prose, code, numbers and other scripts.

Which channels of a key are large depends on the token, so a sample of one kind would leave some of them out.
"""

from __future__ import annotations

SAMPLE_PROMPT = '''\
The harbour had been quiet since Tuesday, when the last of the herring boats came in with her nets torn and two of her
crew asleep on the deck. Nobody asked where she had been. Mrs. Alder, who kept the books for the whole quay, wrote the
name of the boat, the hour and the weight of the catch into a ledger bound in green cloth, and shut it again. "It will
be enough," she said to no one in particular, "if the wind holds."

def settle(ledger: dict[str, int], boat: str, weight: int) -> int:
    """Add a catch to the ledger and return what the boat has landed so far."""
    ledger[boat] = ledger.get(boat, 0) + weight
    return ledger[boat]

| boat    | landed (kg) | price (EUR/kg) | total     |
|---------|-------------|----------------|-----------|
| Petrel  | 1,204.5     | 0.87           | 1,047.92  |
| Halcyon | 86          | 1.15           | 98.90     |

Question: If a boat lands 40 baskets of 32.5 kg and a fifth of it is thrown back, how much is left? Answer: 40 times
32.5 is 1300, a fifth of that is 260, so 1040 kg are left. In German: Am Dienstag lag der Hafen still. En français : le
port était calme depuis mardi. По-русски: во вторник в гавани было тихо. 中文:星期二以来港口一直很安静。

{"boat": "Petrel", "hours": [4, 17, 23], "ok": true} https://harbour.example/log?day=2&boat=petrel#top -- the end of
the page, and the beginning of another one, on which she had written nothing yet but the date: 3 November, 06:15,
wind north-west 4.
'''
