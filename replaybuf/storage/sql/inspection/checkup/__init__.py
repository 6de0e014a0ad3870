"""What can be wrong with a database, found and mended: each function finds one kind of damage, or mends it.

`replaybuf.doctor` says what a finding means, and in which order to look for which.
"""
