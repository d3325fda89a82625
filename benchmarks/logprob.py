"""Time and extra memory of token log-probs, forward and backward, against the plain way.

8192 tokens, a vocabulary of 49152, hidden size 576, float32. Each way runs in processes of its own: extra
memory is the growth of the peak resident set (VmHWM) over what the process held with its inputs in place;
time is the median of three passes after one to warm up, the two ways taking turns to share whatever else the
machine does. Usage: ``python benchmarks/logprob.py [--tokens N] [--vocabulary V] [--hidden H] [--chunk C]``.
The last line is JSON; ``ratio`` is our time over the plain one, ``memory_ratio`` our extra memory over its.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from trimtab.policy.logprob import LogitOptions, token_logprobs


def resident(field: str) -> int:
    """Bytes of ``VmRSS`` (now) or ``VmHWM`` (peak) of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def once(
    way: str, hidden: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, chunk: int, live: float = 1.0
) -> float:
    """Seconds of one forward and backward pass, in which a share ``live`` of the tokens has a gradient."""
    hidden.grad = weight.grad = None
    start = time.perf_counter()
    if way == "plain":
        logp = F.linear(hidden, weight).float().log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    else:
        logp, _ = token_logprobs(hidden, weight, token, options=LogitOptions(chunk=chunk))
    logp[: round(live * len(token))].sum().backward()
    return time.perf_counter() - start


def worker(way: str, args: argparse.Namespace) -> None:
    """Serve passes: one for each line on standard input; prints its seconds and the extra peak so far."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.hidden) * 0.05).requires_grad_()
    token = torch.randint(args.vocabulary, (args.tokens,))
    once(way, hidden[:64].detach().requires_grad_(), weight, token[:64], args.chunk)  # load the maths libraries
    weight.grad = None
    before = resident("VmRSS")
    for _ in sys.stdin:
        seconds = once(way, hidden, weight, token, args.chunk, args.live)
        print(json.dumps({"seconds": seconds, "extra": resident("VmHWM") - before}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--live", type=float, default=1.0, help="share of tokens that have a gradient")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--worker", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args)
    ways = ("plain", "chunked")
    command = [sys.executable, *sys.argv, "--worker"]
    pipes = {w: subprocess.Popen([*command, w], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for w in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    extra: dict[str, float] = {}
    for turn in range(args.passes + 1):
        for way, process in pipes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            extra[way] = answer["extra"] / 2**20
            if turn:
                seconds[way].append(answer["seconds"])
            print(f"{way:8s} {answer['seconds']:7.2f} s  extra {extra[way]:8.1f} MiB", flush=True)
    for process in pipes.values():
        process.communicate()
    times = {way: statistics.median(values) for way, values in seconds.items()}
    figures = {
        "name": "logprob",
        "tokens": args.tokens,
        "vocabulary": args.vocabulary,
        "hidden": args.hidden,
        "chunk": args.chunk,
        "live": args.live,
        "threads": torch.get_num_threads(),
        "seconds": round(times["chunked"], 3),
        "plain_seconds": round(times["plain"], 3),
        "extra_mib": round(extra["chunked"], 1),
        "plain_extra_mib": round(extra["plain"], 1),
        "ratio": round(times["chunked"] / times["plain"], 3),
        "memory_ratio": round(extra["chunked"] / extra["plain"], 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
