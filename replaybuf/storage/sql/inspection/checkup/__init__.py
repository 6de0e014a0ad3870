"""What can be wrong with a database, found and mended: each function finds one thing out, or mends what it finds.

What a finding means, and which are looked for in which order, `replaybuf.doctor` says.
"""
