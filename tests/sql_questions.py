"""The questions that docs/sql.md answers in SQL."""

from __future__ import annotations

from typing import NamedTuple


class Question(NamedTuple):
    """A question in words (Markdown) under a topic, and its statement on each database."""

    topic: str
    text: str
    sqlite: str
    postgresql: str

    def on(self, dialect: str) -> str:
        """Return the statement for a dialect."""
        return self.postgresql if dialect == "postgresql" else self.sqlite


def _questions(text: str) -> tuple[Question, ...]:
    """Parse the questions of a text: below a topic, each is a line above its one or two statements."""
    found, topic = [], ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            topic = block.removeprefix("# ")
            continue
        words, _, statements = block.partition("\n")
        sqlite, _, postgresql = statements.partition("\n-- on PostgreSQL\n")
        found.append(Question(topic, words, sqlite, postgresql or sqlite))
    return tuple(found)


QUESTIONS = _questions("""
# What goes on

What is there, how stale is it, and how good?
SELECT task_name, status, count(*) AS groups, avg(staleness) AS staleness, avg(reward) AS reward
  FROM groups GROUP BY task_name, status ORDER BY task_name, status

# Steps

The last steps, and what they were trained on:
SELECT step, worker, tasks, groups, reward, min_reward, max_staleness, oldest_model_step
  FROM batches ORDER BY id DESC LIMIT 10

Since step 413 the reward falls: who made what that step was trained on?
SELECT worker, count(*) AS groups, avg(reward) AS reward, max(staleness) AS stalest
  FROM batch_groups WHERE step = 413 GROUP BY worker ORDER BY reward

The three worst answers, whole, that it was trained on:
SELECT r.uid, r.worker, length(r.full_response) AS characters, substr(r.full_response, 1, 40) AS begins
  FROM batch_groups b JOIN rollouts r ON r.uid = b.uid
 WHERE b.step = 413 ORDER BY r.reward, r.uid, r.position LIMIT 3

Whose groups were far from the reference model, as the trainer [found out](looking.md#annotations)?
SELECT worker, avg(value) AS kl FROM annotations WHERE step = 413 AND name = 'kl' GROUP BY worker ORDER BY worker

Was anything trained on twice? (A draw counts if all of it was consumed, and no restore undid it.)
WITH runs AS (
    SELECT buffer, restores, min(step) AS first_step
      FROM batches WHERE status = 'completed' AND settled > 0 GROUP BY buffer, restores)
SELECT m.uid, count(*) AS times FROM batches b JOIN batch_groups m ON m.batch = b.id
 WHERE b.status = 'completed' AND b.settled = b.groups AND NOT EXISTS (
    SELECT 1 FROM runs r WHERE r.buffer = b.buffer AND r.restores > b.restores
       AND coalesce(r.first_step <= b.step, TRUE))
 GROUP BY m.uid HAVING count(*) > 1 ORDER BY times DESC, m.uid

# Rewards

By part, of rewards that are dicts:
SELECT task_name, avg(rewards ->> '$.score') AS score, avg(rewards ->> '$.format') AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name
-- on PostgreSQL
SELECT task_name, avg((rewards ->> 'score')::float) AS score, avg((rewards ->> 'format')::float) AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name

Groups in which all answers are worth the same, so that nothing is learned from them:
SELECT task_name, count(*) AS groups, sum(CASE WHEN lowest = highest THEN 1 ELSE 0 END) AS flat
  FROM (SELECT uid, task_name, min(reward) AS lowest, max(reward) AS highest
          FROM rollouts WHERE status = 'completed' GROUP BY uid, task_name) AS spread
 GROUP BY task_name ORDER BY task_name
""")
