"""Run with dm-reverb's Python: what its tables allow, insert and sample, for the cases on stdin (`test_side_by_side`).

For each case, prints a list of [whether an insert is allowed, whether a sample is, the number of items] before each of
its operations. Those that aren't allowed are left out.
"""

import json
import sys

import reverb


def limiter(name, arguments):
    if name == "SampleToInsertRatio" and isinstance(arguments[2], list):
        arguments = [*arguments[:2], tuple(arguments[2])]
    return getattr(reverb.rate_limiters, name)(*arguments)


def run(case):
    table = reverb.Table(
        name="t",
        sampler=getattr(reverb.selectors, case["sampler"])(),
        remover=getattr(reverb.selectors, case["remover"])(),
        max_size=case["max_size"],
        rate_limiter=limiter(*case["rate_limiter"]),
        max_times_sampled=case["max_times_sampled"],
    )
    server = reverb.Server([table])
    client = reverb.Client(f"localhost:{server.port}")
    observed = []
    for number, operation in enumerate(case["operations"]):
        allowed = [table.can_insert(1), table.can_sample(1)]
        observed.append([*allowed, table.info.current_size])
        if operation == "insert" and allowed[0]:
            client.insert(float(number), {"t": float(number % 7)})
        elif operation == "sample" and allowed[1]:
            [[sample]] = client.sample("t", 1)
            observed[-1].append(float(sample.data[0]))
            observed[-1].append(sample.info.times_sampled)
    server.stop()
    return observed


print("\n" + json.dumps([run(case) for case in json.load(sys.stdin)]))
