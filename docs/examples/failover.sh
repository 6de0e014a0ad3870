#!/bin/sh
# Two servers in two folders, and a run that goes on without the first one. As a user that isn't root, with
# PostgreSQL's programs and replaybuf on the path.
set -e
initdb -D db1 -U trainer -A trust
pg_ctl -w -D db1 -l db1.log -o "-p 5441 -k ''" start
createdb -h 127.0.0.1 -p 5441 -U trainer rl
pg_basebackup -D db2 -R -c fast -h 127.0.0.1 -p 5441 -U trainer
pg_ctl -w -D db2 -l db2.log -o "-p 5442 -k ''" start
replaybuf demo --steps 60 --url postgresql://trainer@127.0.0.1:5441,127.0.0.1:5442/rl &
sleep 25; pg_ctl -D db1 -m immediate stop
pg_ctl -w -D db2 promote
wait        # "Each of the 1,920 prompts was trained once."
replaybuf doctor postgresql://trainer@127.0.0.1:5441,127.0.0.1:5442/rl; pg_ctl -D db2 stop
