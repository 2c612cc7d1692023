"""Random words through Inductor: the right bits, and no write beside them.

A constant times an index becomes a loop counter in Inductor's C++; when it overflows, the compiler
may let the loop run past its end (torch 2.13). Each program runs in its own process: a damaged
heap shows when it is used again, and then ends the process.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import torch, mapfn
from mapfn import seeds, transform

key, count = seeds.key(3), {count}
latent, shift = seeds.normal(seeds.key(1), 37).float(), torch.zeros(())
hashed = mapfn.hashed()
functions = {{
    "words": lambda key: seeds.words(key, 5, count),
    "hadamard": lambda key: transform.rows(key, latent, shift, 0, 64 * count),
    "hashed": lambda key: hashed.generate(dict(key=key), latent, shift, 0, 2 * count),
}}
function = functions["{name}"]
compiled = torch.compile(function, fullgraph=True, dynamic=False)
for _ in range(300):
    out = compiled(key)
torch.testing.assert_close(out, function(key))
junk = [torch.randn(size) for size in range(1, 3000)]
del junk
print("alive")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [70, 1003])
@pytest.mark.parametrize("name", ["words", "hadamard", "hashed"])
def test_compiled_words_stay_in_their_tensor(name, count):
    program = PROGRAM.format(name=name, count=count)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "alive"
