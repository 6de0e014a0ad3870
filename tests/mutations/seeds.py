"""The mutations: in a file of `replaybuf`, a text that is there once, what it becomes, and the law that this breaks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    area: str
    file: str
    old: str
    new: str
    law: str

    def problem(self, root: Path = ROOT) -> str | None:
        """Why it can't be applied to this checkout, or None."""
        path = root / "replaybuf" / self.file
        if not path.is_file():
            return f"{self.name}: there is no file replaybuf/{self.file}"
        times = path.read_text().count(self.old)
        return None if times == 1 else f"{self.name}: found {times} times in replaybuf/{self.file}: {self.old!r}"


_LIMITS, _LEVEL, _RATE = "rules/limits.py", "rules/limits.py", "rules/limits.py"
_RACE, _TRANSITIONS = "rules/policies.py", "rules/transitions.py"
_STALENESS = "values/rollouts/staleness.py"
_MARKS, _NORMALISE = "values/rollouts/marks.py", "values/rollouts/normalise.py"
_STATEMENTS, _ENGINE = "storage/sql/statements", "storage/sql/engine"

_RULES = [
    ("rate-insert", _LIMITS, "self._always_insertable(rate) - level.completed)", "0)", "puts may always refill what was lost"),
    ("rate-draw-rounding", _RATE, "math.floor(ahead + _ROUNDING)", "math.floor(ahead) + 1", "draws don't run ahead"),
    ("min-size", _LIMITS, "if level.completed < self.min_size:\n            return 0", "if level.completed <= self.min_size:\n            return 0", "min_size groups are enough to draw"),
    ("capacity-when-blocking", _LIMITS, "max(0, self.capacity - level.completed)", "max(0, self.capacity + 1 - level.completed)", "a full buffer takes no more"),
    ("keeps-one-draw-more", _LIMITS, "times_sampled < self.max_times_sampled", "times_sampled <= self.max_times_sampled", "a group leaves with its n-th draw"),
    ("keeps-all-statuses", _LIMITS, "if status != Status.COMPLETED:\n            return False", "if status == Status.FAILED:\n            return False", "groups that aren't completed leave by a draw"),
    ("inserted-counts-all", _LEVEL, "self.inserted + completed, self.sampled", "self.inserted + 1, self.sampled", "the rate counts completed groups only"),
    ("replaced-stays-buffered", _LEVEL, "self.completed - completed, self.inserted, self.sampled", "self.completed, self.inserted, self.sampled", "what is replaced makes room"),
    ("batch-larger-than-rate", _LIMITS, "largest = min(rate.drawable_when_puts_wait, self._always_insertable(rate))", "largest = rate.drawable_when_puts_wait + 1", "batches that could never be drawn are refused"),
    ("unfit-takes-room", _LEVEL, "self.buffered + (status not in ASIDE)", "self.buffered + 1", "what is not trained on takes no room"),
    ("unfit-is-expired", _TRANSITIONS, "Tally.PRUNED if status in UNFIT else Tally.DROPPED", "Tally.DROPPED", "what is unfit isn't counted as too old"),
    ("error-range-too-narrow", _RATE, "self.drawable_when_puts_wait < 1 or", "high <= low or", "a range in which nothing moves is refused"),
    ("error-range-too-high", _RATE, " or low > begins", "", "a range that begins too high is refused"),
    ("error-range-shifted", _RATE, "return self.error_buffer\n", "return self.error_buffer[0] + self.min_size, self.error_buffer[1]\n", "min_size doesn't shift a range"),
    ("error-buffer-too-small", _RATE, " or (self.min_size == 0 and high < ratio):", ":", "configs that can't move are refused"),
    ("deliveries-one-more", _TRANSITIONS, "0 < limits.max_deliveries <= group.deliveries", "0 < limits.max_deliveries < group.deliveries", "the n-th failed delivery is the last"),
    ("given-back-still-drawn", _TRANSITIONS, "return _step(before, Place(group.status), counts, draws=-1, deliveries=-1 if reason is None else 0)", "return _step(before, Place(group.status), counts, draws=0, deliveries=-1 if reason is None else 0)", "a group that comes back was not drawn"),
    ("no-reason-counts", _TRANSITIONS, "deliveries=-1 if reason is None else 0)", "deliveries=0)", "giving back without a reason is no delivery"),
    ("archives-other-statuses", _TRANSITIONS, "archived = status == Status.COMPLETED and limits.archives", "archived = limits.archives", "only completed groups are archived"),
    ("sampled-again", _TRANSITIONS, "Tally.SAMPLED_AGAIN if times_before else Tally.SAMPLED_NEW", "Tally.SAMPLED_NEW", "first and later draws are counted apart"),
    ("order-none-first", "rules/policies.py", "result = known + unknown", "result = unknown + known", "groups without a value come last"),
    ("order-from-the-wrong-end", "rules/policies.py", "for term in reversed(order):", "for term in order:", "the first term of an order decides"),
    ("staleness-least-first", "rules/policies.py", 'order = (OrderTerm("staleness", descending=True)', 'order = (OrderTerm("staleness")', "the policy staleness draws the most stale first"),
    ("seed-of-the-remover", "rules/policies.py", "resolved.seed = check_seed(seed)", "check_seed(seed)", "the config's seed is that of its policy"),
    ("policy-seed-bound", "rules/policies.py", "0 <= number < 2**64", "0 <= number <= 2**64", "seeds have 64 bits"),
]  # fmt: skip

_RACES = [
    ("race-ignores-weight", _RACE, "_exponential(active, ticket) / max(weight, SLOWEST)", "_exponential(active, ticket)", "the chance of a group is in proportion to its priority"),
    ("race-clock-stands", _RACE, "self.time = max(self.time, key)", "self.time = self.time", "a group that comes later has no advantage"),
    ("race-idle-clock-stands", _RACE, "self.idle_time = max(self.idle_time, key / IDLE - 1.0)", "pass", "groups of priority 0 race on among themselves"),
    ("race-seed-is-dead", _RACE, "_mix(self.seed ^ now)", "_mix(now)", "the seed makes the draws"),
    ("race-never-worn", _RACE, "return self.idle_time > _FEW_DIGITS or any", "return False and any", "keys never lose too many digits"),
    ("share-of-nothing", _RACE, "/ UNIT if priority else 0.0", "/ UNIT", "priority 0 has no share"),
    ("race-rounds-idle-below", _RACE, "if weight > 0:", "if weight >= 0:", "priority 0 is drawn last"),
]  # fmt: skip

_ROLLOUTS = [
    ("expires-too-late", _STALENESS, "staleness >= self.stale_threshold", "staleness > self.stale_threshold", "what is as stale as the threshold has expired"),
    ("tokens-expire-too-late", _STALENESS, "train_step - newest_step - 1 >= self.token_stale_threshold", "train_step - newest_step - 1 > self.token_stale_threshold", "so has a token"),
    ("staleness-off-by-one", _STALENESS, "return 0 if oldest_step is None else train_step - oldest_step - 1", "return 0 if oldest_step is None else train_step - oldest_step", "staleness is the steps between"),
    ("newest-token-ignores-mask", "values/rollouts/group_fields.py", "max(map(int, compress(steps, mask)), default=None)", "max(map(int, steps), default=None)", "only trainable tokens are fresh"),
    ("agentic-tokens-expire", "values/rollouts/group_fields.py", "agentic = is_agentic(group)", "agentic = False", "groups with input_ids have no token staleness"),
    ("fill-overwrites-steps", _STALENESS, "return [*(steps or ()), *([model_step] * missing)]", "return [model_step] * missing", "steps that are there stay"),
    ("group-least-stale", _NORMALISE, 'staleness = max(ages)', 'staleness = min(ages)', "a group is as stale as its stalest rollout"),
    ("reset-keeps-reward", _STALENESS, '"response_mask", "reward", "error_msg")', '"response_mask", "error_msg")', "an expired rollout has no reward"),
    ("marks-forget-the-expired", _MARKS, "[old or new for old, new in zip(before, fired, strict=True)]", "fired", "what has expired stays expired"),
    ("marks-keep-reward", _MARKS, "self.reward = [None if expired else value", "self.reward = [value", "expired rollouts don't count in the mean"),
    ("marks-keep-oldest", _MARKS, "self.oldest = [None if expired else step", "self.oldest = [step", "an expired rollout has no steps"),
    ("mean-over-all", _MARKS, "return sum(numbers) / len(numbers)", "return sum(numbers) / len(self.reward)", "the mean is over those that have a reward"),
    ("mixed-never", _MARKS, "return 0 < self.oldest.count(None) < len(self.oldest)", "return False", "a mixed group's staleness is never below 0"),
    ("infinite-reward", "values/rollouts/rewards.py", "return value if -_LARGEST <= value <= _LARGEST else None", "return value", "infinite rewards don't count"),
    ("dropped-not-told", _NORMALISE, "return Normalised(Status.EXPIRED, staleness, train_step, dropped=True)", "return Normalised(Status.EXPIRED, staleness, train_step)", "what isn't retryable is dropped"),
    ("expired-follows-step", _NORMALISE, "return Normalised(Status.EXPIRED, staleness, None)", "return Normalised(Status.EXPIRED, staleness, train_step)", "an expired group's staleness is pinned"),
    ("put-keeps-stale-tokens", _NORMALISE, "    mask_stale_tokens(rollouts, through, kind)\n", "", "put masks tokens that are too old"),
    ("refresh-keeps-stale-tokens", _MARKS, "self.masked = through\n", "pass\n", "and so does a refresh"),
    ("stale-token-late", _STALENESS, "return train_step - 1 - self.token_stale_threshold", "return train_step - 2 - self.token_stale_threshold", "a token as stale as the threshold is masked"),
    ("undated-passes", _NORMALISE, "(index := undated(fields_of(rollouts, kind))) is not None", "(index := None) is not None", "a response without steps has no age"),
    ("expired-before-stays", _NORMALISE, "if (expired or status == Status.EXPIRED) and not rule.retryable:", "if expired and not rule.retryable:", "what expired before is dropped, too"),
    ("their-status-by-value-only", "values/rollouts/statuses.py", "candidates += [value.value, value.name]", "candidates += [value.value]", "members are known by their names, too"),
    ("alias-as-status", "values/rollouts/statuses.py", "return (exact or fitting)[0]", "return fitting[0]", "what is named so comes before an alias"),
    ("no-other-word", "values/rollouts/statuses.py", "for target in (status, *_SUBSTITUTES.get(status, ())):", "for target in (status,):", "expired rollouts can be generated again, whatever their class calls it"),
    ("hidden-name", "values/rollouts/rollout_type.py", "return {**hidden, **{key", "return {**{key", "a field that means another isn't the one of its own name"),
    ("status-precedence", "values/rollouts/statuses.py", "    Status.FAILED,\n    Status.ABORTED,\n", "    Status.ABORTED,\n    Status.FAILED,\n", "a group with a failed rollout is failed"),
]  # fmt: skip

_QUERY = [
    ("sql-between-open-below", "rules/query/parse.py", 'ScalarNode(name, "$gte", lower)', 'ScalarNode(name, "$gt", lower)', "$between has its lower bound in SQL, too"),
    ("sql-null-in-set", "rules/query/sql_conditions.py", "return condition if len(operands) == len(values) else or_(condition, self._is_missing(field))", "return condition", "None in a set matches what is missing"),
    ("sql-null-not-negatable", "rules/query/sql_conditions.py", "and_(self._columns[field].is_not(None), condition) if FIELDS[field].nullable else condition", "condition", "a negated condition holds where the value is missing"),
    ("bool-is-a-number", "rules/query/parse.py", 'or (isinstance(value, bool) and field.kind != "tag")', "", "True is no number"),
    ("nan-in-a-query", "rules/query/parse.py", "if math.isnan(number):", "if False:", "NaN compares with nothing"),
    ("nan-in-a-list", "rules/query/parse.py", "return not any(map(math.isnan, listed))", "return True", "NaN in a list compares with nothing"),
    ("statuses-at-a-glance", "rules/query/parse.py", 'field.kind != "status" and is_storable', "is_storable", "a list of statuses has only those that there are"),
    ("texts-at-a-glance", "rules/query/parse.py", ' and is_storable("".join(listed))', "", "texts that can't be stored are refused in a list, too"),
    ("naive-time-is-local", "rules/query/parse.py", "moment.replace(tzinfo=UTC)", "moment", "a datetime without a zone is UTC"),
]  # fmt: skip

_CODEC = [
    ("checksum-not-checked", "values/codec/payload_format.py", "if digest(", "if False and digest(", "a damaged payload is noticed"),
    ("arrays-share-a-block", "values/codec/blocks.py", "self._lends and not is_lent and", "self._lends and", "equal arrays come back apart"),
    ("number-nearly-repeated", "values/codec/blocks.py", "if any(array.tobytes() != number * len(array) for array in arrays):", "if False:", "arrays that repeat a number at their ends only keep their bits"),
    ("newer-format-read", "values/codec/payload_format.py", "if version != VERSION:", "if version > VERSION + 1:", "newer formats are refused"),
    ("lengths-not-checked", "values/codec/blocks.py", "if not fits:", "if False:", "lengths add up"),
    ("int-without-sign", "values/codec/value_types.py", 'int.from_bytes(raw, "little", signed=True)', 'int.from_bytes(raw, "little")', "big negative integers come back as they were"),
    ("numbers-of-any-kind", "values/codec/number_lists.py", ' if items["kind"].tobytes().count(mark) == len(items) else None', "", "True among integers stays True"),
    ("numbers-repeated-ends", "values/codec/number_lists.py", " and (numbers == numbers[0]).all()", "", "numbers between equal ends stay"),
    ("numbers-of-other-sizes", "values/codec/number_lists.py", "    if len(raw) != ends[-1]:\n        return None\n", "", "an integer of 64 bits among others stays"),
    ("numbers-of-a-byte", "values/codec/number_lists.py", "<= numbers.max() < 256)", "<= numbers.max())", "larger numbers than a byte's come back"),
    ("field-twice-alone", "values/codec/msgpack_values.py", "if 3 * len(fields) == len(flat):", "if True:", "a lone rollout has no field twice"),
    ("field-twice-deferred", "values/codec/msgpack_values.py", "if 3 * len(values) != count or ", "if ", "deferred reads notice a field that is there twice"),
    ("users-code-changes-payloads", "values/codec/payload.py", "lends = not self.runs_code\n", "lends = True\n", "users' code that runs in a read changes no payload"),
    ("blocks-not-sealed", "values/codec/payload_format.py", "sealed = size >= sealed_from", "sealed = False", "payloads apart have their checksums"),
    ("names-shared", "values/rollouts/shapes.py", "self._make_instance(values, names.copy(), None)", "self._make_instance(values, names, None)", "each rollout has its own set fields"),
    ("fold-lost", "values/codec/value_types.py", "replace(fold=fold, tzinfo=tz)", "replace(tzinfo=tz)", "a time that is there twice comes back as it was"),
    ("open-tags", "values/codec/msgpack_values.py", "if self._open_tags:", "if False:", "type tags without content are damage"),
    ("twin-classes", "values/rollouts/rollout_type.py", "cls = classes[0] if len(classes) == 1 else None", "cls = classes[0] if classes else None", "a name that fits two classes says neither"),
    ("annotated-text-run", "values/rollouts/annotations.py", "if origin in _ANNOTATED:", "if origin is Ellipsis:", "what stands beside a type in Annotated is no annotation"),
    ("enum-as-value", "values/codec/user_classes.py", "return cls[names[0]] if names else cls(value)", "return value", "enum members come back as members"),
    ("image-info-lost", "values/codec/library_values.py", "image.info = info", "pass", "what an image says of itself comes back"),
    ("unknown-converter-read", "values/codec/user_classes.py", "if self._as_plain:\n            return encoded", "if True:\n            return encoded", "what an unknown converter stored is refused"),
]  # fmt: skip

_SQL = [
    ("put-ignores-refusals", f"{_STATEMENTS}/put.py", "levels[new.task_name] = level.joined_by(new.status)", "pass", "puts that are committed together share the room"),
    ("put-follows-other-step", f"{_STATEMENTS}/new_rows.py", "and home.step == new.train_step\n", "\n", "a group put for another step keeps its staleness"),
    ("runs-lock-their-keys", f"{_STATEMENTS}/put.py", "    _lock_keys(tx, groups)  # each", "    pass  # each", "two batches with the same keys in another order never deadlock"),
    ("puts-of-a-key-out-of-turn", f"{_STATEMENTS}/put.py", "return not has_keys and names", "return names", "the last put of a key stays, in another transaction, too"),
    ("refused-puts-take-uids", f"{_STATEMENTS}/put.py", "CAST(:allowed AS bigint) IS NULL OR", "true OR", "a put without room takes no uid"),
    ("fenced-puts-take-uids", f"{_STATEMENTS}/put.py", "coalesce(epoch, 0) = CAST(:epoch AS bigint) AND", "true AND", "a put that is fenced off takes no uid"),
    ("put-first-key-stays", f"{_STATEMENTS}/put.py", "(new.task_name, new.key) if new.key is not None else None", "None", "of several with a key the last stays"),
    ("refresh-leaves-expired", f"{_STATEMENTS}/refresh.py", "if home.status == Status.EXPIRED and not rule.retryable:", "if False:", "a refresh drops what expired before and isn't retryable"),
    ("evicts-unfit", f"{_STATEMENTS}/eviction.py", "aside=sorted(map(str, ASIDE))", 'aside=["archived"]', "filtered and failed groups neither fill nor leave"),
    ("keeps-more-aside", f"{_STATEMENTS}/upkeep.py", "max(0, size - (groups or 0))", "max(0, size - (groups or 0) - 1)", "no more stay than the bound"),
    ("leaving-untold", f"{_STATEMENTS}/eviction.py", "    note(tx, evicted, leaving)\n", "", "who asks has what was evicted"),
    ("put-no-eviction", f"{_STATEMENTS}/put.py", "    if evicting:\n        evict(", "    if False:\n        evict(", "capacity evicts"),
    ("take-ignores-limits", f"{_STATEMENTS}/take.py", "if draw.status == Status.COMPLETED and limits.slows_draws:", "if False:", "draws keep to the rate"),
    ("take-partly", f"{_STATEMENTS}/take.py", "and not draw.is_met_by(", "and False and not draw.is_met_by(", "a draw takes at least what it has to, or nothing"),
    ("take-clock-stands", f"{_STATEMENTS}/take.py", "for home, members in by_home(rows) if policy.is_race else ():", "for home, members in ():", "a draw moves the clock of its race"),
    ("take-overdue-stay", f"{_STATEMENTS}/take.py", "sum(draw.sizes.values()) and end_leases(tx, wait=True) > 0", "sum(draw.sizes.values()) and False", "a draw that finds too little ends leases that are over"),
    ("take-incomplete", f"{_STATEMENTS}/take.py", "if not incomplete:", "if True:", "a group without its payload is set aside"),
    ("take-damaged", "storage/sql/tasks/delivery.py", "if not failed:", "if True:", "a damaged group is set aside"),
    ("lease-lost-is-late", f"{_STATEMENTS}/leases.py", "    if len(rows) < len(uids):\n", "    if False:\n", "an acknowledgement that comes too late is refused"),
    ("settled-lease-goes-on", f"{_STATEMENTS}/leases.py", "        return lease.until\n", "        return tx.start_clock() + seconds\n", "a lease that other handles have settled ends with its time"),
    ("settled-lease-is-lost", f"{_STATEMENTS}/leases.py", "if tx.value(_ACKNOWLEDGED, lease=lease.token, uids=list(uids)) == len(uids):", "if False:", "what other handles acknowledged in time isn't lost"),
    ("damage-stops-refreshes", f"{_STATEMENTS}/refresh.py", "if unreadable and home.status != Status.FAILED:", "if False:", "a refresh sets groups aside whose marks are damaged"),
    ("lease-never-ends", f"{_STATEMENTS}/leases.py", "if not uids:", "if True:", "a lease that is over comes back"),
    ("move-unpinned", f"{_STATEMENTS}/counts.py", "if step.pins_staleness and step.before is not None:", "if False:", "a group that leaves its lane keeps its staleness"),
    ("move-archived-when", f"{_STATEMENTS}/counts.py", "time.time() if after.status in ASIDE and not after.leased else None", "None", "the archive knows since when"),
    ("move-without-keys", f"{_STATEMENTS}/counts.py", "if step.enters_races:", "if False:", "who comes back races from the present time"),
    ("move-keeps-draws", f"{_STATEMENTS}/counts.py", "\"times_sampled\": step.draws", "\"times_sampled\": 0", "draws of a group are counted"),
    ("restore-keeps-changed", f"{_STATEMENTS}/past.py", "SELECT uid FROM rb_group WHERE uid > :last_uid UNION SELECT uid FROM rb_past WHERE {_VALID}", "SELECT uid FROM rb_group WHERE uid > :last_uid", "groups that have changed come back as they were"),
    ("restore-keeps-new-ones", f"{_STATEMENTS}/past.py", "uid > :last_uid UNION", "uid > :last_uid AND uid < 0 UNION", "what was put since is gone"),
    ("restore-forwards", f"{_STATEMENTS}/checkpoints.py", "    tx.change(query, buffer=tx.scope.buffer, id=number)\n", "", "a later checkpoint is restored after an earlier one"),
    ("restore-leaves-versions", f"{_STATEMENTS}/past.py", "        tx.change(f\"DELETE FROM rb_past WHERE {condition} AND removed_at IS NOT NULL\", **values)  # noqa: S608\n", "", "what came back may leave again"),
    ("undo-takes-a-key", f"{_STATEMENTS}/leases.py", "(key is not None and is_taken(tx, key, row.uid, made_before)) or ", "", "a checkpoint never has two groups with one key"),
    ("restore-forgets-keys", f"{_STATEMENTS}/parts.py", "(_KEEP_APART, _FORGET)", "(_FORGET,)", "later checkpoints keep their keys"),
    ("restore-forgets-draws", f"{_STATEMENTS}/past.py", "        tx.change(f\"UPDATE rb_past SET until = NULL, removed_at = NULL WHERE {condition} AND {_RECORDED}\", **values)  # noqa: S608\n", "", "a restored group was drawn all the same"),
    ("undo-leaves-versions", f"{_STATEMENTS}/past.py", "    tx.change(sql, uid=uid, since=since)\n", "", "an undone draw leaves nothing in checkpoints"),
    ("undo-not-in-checkpoints", f"{_STATEMENTS}/leases.py", "    undo(\"rb_past\", \" AND since >= :since\", since=max(made_before, row.column(\"since\")))\n", "", "an undone draw is undone in checkpoints"),
    ("undo-not-counted", f"{_STATEMENTS}/leases.py", "    add_to_checkpoints(tx, counts, made_before)\n", "", "an undone draw is counted in no checkpoint"),
    ("change-not-kept", f"{_STATEMENTS}/counts.py", "    keep(tx, [row.uid for row in staying", "    list([row.uid for row in staying", "what changes after a checkpoint is in it as it was"),
    ("priority-not-kept", f"{_STATEMENTS}/matching.py", "        keep(tx, [uid for uid, _ in locked])\n", "", "priorities go back"),
    ("refresh-not-kept", f"{_STATEMENTS}/refresh.py", "    keep(tx, [uid for uid, *_ in rows])\n", "", "what expires after a checkpoint is in it as it was"),
    ("restore-leaves-cursors", f"{_STATEMENTS}/checkpoints.py", "    _set_cursors(tx, number)\n    begin", "    begin", "cursors go back"),
    ("restore-leaves-counts", f"{_STATEMENTS}/checkpoints.py", "    _set_tallies(tx, lanes, saved[\"tallies\"])", "    pass", "counts go back"),
    ("restore-leaves-lanes", f"{_STATEMENTS}/checkpoints.py", "    _set_lanes(tx, lanes, saved[\"lanes\"])", "    pass", "train steps and clocks go back"),
    ("restore-leased", f"{_STATEMENTS}/checkpoints.py", "    begin_epoch(tx, step, now, shift)\n    return_all(tx)", "    begin_epoch(tx, step, now, shift)", "nobody of the restored run holds a lease"),
    ("restore-no-fence", f"{_STATEMENTS}/fence.py", "epoch = (_fence_row(tx).epoch or 0) + 1", "epoch = (_fence_row(tx).epoch or 0)", "a restore fences off who was there"),
    ("fence-not-checked", f"{_STATEMENTS}/fence.py", "if (row.epoch or 0) != tx.scope.epoch:", "if False:", "who is left over from the run before can't write"),
    ("tickets-not-shifted", f"{_STATEMENTS}/fence.py", "        tx.scope = replace(tx.scope, ticket_shift=shift)", "        pass", "tickets go on where the restore has put them"),
    ("checkpoint-without-cursors", f"{_STATEMENTS}/checkpoints.py", "    copy_cursors(tx, 0, new)\n    note", "    note", "cursors are part of checkpoints"),
    ("checkpoint-keeps-one-less", f"{_STATEMENTS}/checkpoints.py", "list_checkpoints(tx, tx.scope.buffer)[:-keep])", "list_checkpoints(tx, tx.scope.buffer)[: 1 - keep])", "the last n checkpoints stay"),
    ("dropped-not-passed-on", f"{_STATEMENTS}/past.py", "AND c.id < :dropped AND c.id > rb_past.since", "AND c.id < :dropped AND c.id < 0", "what a dropped checkpoint had stays for earlier ones"),
    ("checkpoint-beside-writers", "storage/sql/backend.py", "time.time(), alone=True", "time.time(), alone=False", "each write is before a checkpoint or after it"),
    ("checkpoint-next-ticket", f"{_STATEMENTS}/fence.py", "last_uid(tx) + 1)", "last_uid(tx) + 2)", "random draws go on as they would have"),
    ("sweep-what-checkpoints-need", f"{_STATEMENTS}/past.py", "AND NOT EXISTS (SELECT 1 FROM rb_past p WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)\n", "", "payloads of checkpoints are not swept"),
    ("sweep-forgets-draws", f"{_STATEMENTS}/past.py", "if key[2] in recorded]", "if key[2] < 0]", "the groups of a draw are known as long as it is"),
    ("records-keep-payloads", f"{_STATEMENTS}/past.py", "WHERE p.uid = rb_payload.uid AND p.removed_at IS NOT NULL)", "WHERE p.uid = rb_payload.uid)", "what a draw took is swept"),
    ("undone-draw-still-recorded", f"{_STATEMENTS}/batches.py", "        tx.change(\"DELETE FROM rb_past WHERE draw = :draw AND draw > 0 AND removed_at IS NULL\", draw=number)\n", "", "an undone draw had no groups"),
    ("leased-version-stays-trained", f"{_STATEMENTS}/leases.py", "CASE WHEN lease IS NULL THEN 0 ELSE 1 END", "0", "an undo takes the trained step back from a version that a lease had"),
    ("undone-draw-renumbered", "storage/sql/schema/tables.py", "    sqlite_autoincrement=True,  # versions of a pruned or undone draw keep its number\n", "", "the number of a draw is not given again"),
    ("undo-beside-a-sweep", "storage/sql/tasks/delivery.py", "            lock(tx, uids)  # so that a sweep, which goes by the batch and deletes payloads, has ended or skips them\n", "", "an undo waits for a sweep of its groups"),
    ("pruned-draws-stay", f"{_STATEMENTS}/batches.py", "    tx.change(\"DELETE FROM rb_past WHERE draw {in:draws} AND draw > 0 AND removed_at IS NULL\", draws=draws)\n", "", "the groups of a draw go with it"),
    ("settled-elsewhere", f"{_STATEMENTS}/batches.py", "            tx.send(query, old=recorded[\"id\"], uids=list(uids))\n", "", "groups of another step are of another batch"),
    ("sweep-at-once", "storage/sql/tasks/sweeper.py", "pause = _random.uniform(0, 2 * _IDLE_SECONDS)", "pause = 0.0", "the first calls come before the background work"),
    ("pool-without-patience", f"{_ENGINE}/postgres_pool.py", "remaining = begun + patience - time.monotonic()", "remaining = 0.0", "a connection is waited for before another is made"),
    ("sweep-no-grace", "storage/sql/tasks/sweeper.py", "cutoff = now - GRACE_SECONDS", "cutoff = now", "payloads stay for a while after a take"),
    ("claim-moved-cursor", f"{_STATEMENTS}/ledger.py", " AND version = :known", "", "a cursor that was moved isn't moved again"),
    ("claim-of-other-epoch", f"{_STATEMENTS}/ledger.py", "if moved.epoch != tx.scope.epoch:", "if False:", "a cursor of the run before doesn't move this one"),
    ("replaced-missing", f"{_STATEMENTS}/eviction.py", "    if missing:\n        raise ConflictError", "    if False:\n        raise ConflictError", "what isn't there can't be replaced"),
    ("replaced-twice", f"{_STATEMENTS}/eviction.py", "stored.pop(uid, None)", "pass", "each group is replaced once"),
    ("isolation-of-writes", f"{_ENGINE}/postgres.py", "BEGIN ISOLATION LEVEL {level}", "BEGIN", "what waited for a lock sees what was committed meanwhile"),
    ("reader-writes", f"{_ENGINE}/postgres.py", "' READ ONLY' if self.access.read_only else", "' READ ONLY' if False else", "a reader can't write, whatever its settings"),
    ("pool-busy-unsaid", f"{_ENGINE}/postgres_pool.py", "if self.size == MOST_CONNECTIONS and limit.expired():", "if False:", "who waits in vain for a connection is told why"),
    ("row-too-large", f"{_ENGINE}/dialect.py", "if size > MOST_ROW_BYTES:", "if False:", "what is larger than a row isn't sent"),
    ("lease-wall-clock", f"{_ENGINE}/sqlite_dialect.py", "return time.time() if start is None else", "return time.time() if True else", "leases pass evenly, though the clock is set"),
]  # fmt: skip

_FAILOVER = [
    ("old-primary-followed", f"{_ENGINE}/postgres_connect.py", "self.timeline < followed.timeline", "False", "who follows a new primary never goes back to the old one"),
    ("any-primary", f"{_ENGINE}/postgres_servers.py", "best = {host: state for host, state in fit.items() if (state.timeline or 0) == newest}", "best = fit", "of two primaries the one with the higher timeline is followed"),
    ("two-primaries", f"{_ENGINE}/postgres_servers.py", "    if writes and len(", "    if False and len(", "two primaries of one timeline are refused"),
    ("stamp-always", f"{_ENGINE}/locks.py", " WHERE mark.number < excluded.number;", ";", "a transaction that was committed isn't repeated"),
    ("stamp-unheard", f"{_ENGINE}/postgres.py", "not attempt.is_raised  # by", "False  # by", "nothing follows a stamp that is refused"),
    ("stamp-anew", f"{_ENGINE}/postgres.py", "attempt.stamp, attempt.result = doubtful.stamp, doubtful.result", "attempt.result = doubtful.result", "a repeat has the stamp of the transaction whose answer was lost"),
    ("stamp-unreplicated", f"{_ENGINE}/postgres.py", "attempt.committing = was_committed or", "attempt.committing =", "a commit that was interrupted while it waited for the standby isn't believed"),
    ("stamp-locked", f"{_ENGINE}/postgres.py", "return error if waits or self._is_lost(error, attempt) else None", "return error if self._is_lost(error, attempt) else None", "a repeat waits for the transaction whose answer was lost"),
    ("lost-unseen", f"{_ENGINE}/postgres_servers.py", "stamps.get(row, 0) < number", "False", "who saw lost commits is told"),
    ("lost-and-on", f"{_ENGINE}/postgres.py", "        if self.missing_commits and not accepts_loss:\n", "        if False:\n", "who saw lost commits writes nothing"),
    ("lost-for-ever", f"{_ENGINE}/postgres.py", "            self.pool.servers.accept()", "            pass", "after a restore the run goes on"),
    ("numbers-again", f"{_ENGINE}/postgres_servers.py", "            if state.timeline > 1:\n", "            if False:\n", "numbers of lost transactions aren't given again"),
    ("standby-for-ever", f"{_ENGINE}/postgres.py", "bounded(began if since is None else since, ", "bounded(None, ", "a commit doesn't wait for a standby without an end"),
    ("ports-unchecked", f"{_ENGINE}/urls.py", " or int(port or 1) not in _PORTS", "", "a port among several hosts is one"),
]  # fmt: skip

_OWNER = [
    ("owner-not-undone", f"{_ENGINE}/thread.py", "if self.undo is not None and self.outcome is not None:", "if False:", "what is done for a caller that has gone is undone"),
    ("owner-not-awaited", f"{_ENGINE}/thread.py", "self.block_on(self.loop.create_task(call.wait_undone()))", "pass", "later calls wait for that of a caller that has gone"),
    ("owner-of-both", f"{_ENGINE}/thread.py", "            if self._state != _RUNNING:\n", "            if False:\n", "a result belongs to its caller, or is undone"),
    ("owner-receives-late", f"{_ENGINE}/thread.py", "            if self._state != _OFFERED:\n", "            if False:\n", "what was taken back at closing isn't received"),
    ("owner-lost", f"{_ENGINE}/thread.py", "if isinstance(error, OutcomeUnknownError) and call.undo is not None:", "if False:", "what a commit took whose answer was lost comes back"),
    ("owner-tried-once", f"{_ENGINE}/thread.py", "        if not await _is_settled(attempt):\n", "        if not await _is_settled(attempt) and False:\n", "an undo that fails is tried again"),
    ("owner-undone-in-doubt", f"{_ENGINE}/outage.py", "            if await doubt.was_committed():\n", "            if await doubt.was_committed() and False:\n", "an undo whose answer was lost isn't done twice"),
    ("owner-of-some", "storage/sql/tasks/group_commit.py", "call.left -= 1", "call.left = 0", "puts of several groups return when all are stored"),
    ("refused-puts-wake", "storage/sql/tasks/group_commit.py", "if any(isinstance(outcome, int) for outcome in outcomes):", "if outcomes:", "a put that waits for room doesn't wake itself"),
]  # fmt: skip

_PROMPTS = [
    ("prompts-cursor-stands", "produce/sampler.py", "position=cursor.position + len(groups), value=end", "position=cursor.position + len(groups), value=cursor.value", "each prompt is drawn once"),
    ("prompts-number", "produce/sampler.py", "self._new_group(item, cursor.position + offset)", "self._new_group(item, offset)", "prompts are numbered over all draws"),
    ("prompts-keep-partial", "produce/sampler.py", "                    if not partial:\n", "                    if False:\n", "interrupted rollouts begin anew unless partial"),
    ("prompts-init-stranded", "produce/sampler.py", "(statuses | {repr((Status.INIT, None)): (Status.INIT, None)})", "statuses", "prompts of dead workers are handed out"),
    ("prompts-uid-not-moved", "produce/prompt.py", "self.uid = self.uid if uid is None else uid", "pass", "a saved prompt can be finished"),
    ("prompts-share-rollouts", "produce/sampler.py", "[copy.copy(rollout) for rollout in group]", "list(group)", "the dataset keeps its own rollouts"),
    ("prompts-counts", "produce/sampler.py", "drawn - returned - in_flight)", "drawn - returned)", "prompts in flight aren't finished"),
    ("prompts-excluded-wait", "produce/sampler.py", "{status for status, where in statuses if where is None}", "{status for status, where in statuses}", "a draw waits for no prompt that its query excludes"),
    ("epochs-one-more", "produce/datasets.py", "elif index and epoch + 1 != self._epochs:", "elif index and epoch != self._epochs:", "a dataset is read so many times"),
    ("shuffle-every-epoch-alike", "produce/datasets.py", "spawn_key=(epoch,)", "spawn_key=(0,)", "every epoch has another order"),
    ("shuffle-other-seed", "produce/datasets.py", "if seed != source.seed:", "if False:", "a run goes on with its own order"),
    ("shuffle-other-size", "produce/datasets.py", "if seed is not None and source.size != size_then:", "if seed is not None and index > source.size:", "a shuffled dataset can't change its size"),
]  # fmt: skip

_PRODUCE = [
    ("produce-forgets-flying", "produce/strategies.py", "self.ahead - completed - len(self)", "self.ahead - completed", "no more is generated than the batch needs"),
    ("produce-ahead-down", "produce/strategies.py", "math.ceil(round(self.over_sample * batch_size, 9))", "math.floor(self.over_sample * batch_size)", "over_sample is rounded up"),
    ("produce-threshold", "produce/strategies.py", "(updates + 1) * self.sync_weights_interval", "updates * self.sync_weights_interval", "max_staleness may be trained on"),
    ("produce-tail-late", "produce/strategies.py", "if tail_size >= self.tail_batch_trigger_size:", "if tail_size > self.tail_batch_trigger_size:", "so many make a tail batch"),
    ("produce-tail-runs-ahead", "produce/strategies.py", "batch.ahead = 0 if tail else", "batch.ahead = 1 if tail else", "a tail batch runs ahead of nothing"),
    ("produce-concurrency", "produce/generations.py", "concurrency - len(self))", "concurrency - len(self) + 1)", "max_concurrency bounds what is generated at once"),
    ("produce-waste", "produce/generations.py", "if self.failures.wasted - since >= self.strategy.give_up_after * self.size:", "if False:", "what is generated in vain has an end"),
    ("produce-keeps-aborted", "produce/generations.py", "discard_partial_responses(group, self._kind, Status.ABORTED)", "pass", "without partial rollouts what was interrupted begins anew"),
    ("produce-init-is-fine", "produce/agent_loop.py", "if status in (Status.INIT, Status.EXPIRED, Status.ARCHIVED):", "if status in (Status.EXPIRED, Status.ARCHIVED):", "a group of which nothing was generated is refused"),
    ("produce-room", "produce/generations.py", "count = min(count, room - in_flight)", "count = min(count, room)", "what is in flight needs room, too"),
]  # fmt: skip

_OBSERVE = [
    ("observe-escape", "view/metrics.py", "[_encodable(text) for", "[text for", "a name stays within its label"),
    ("observe-leased-drawable", "storage/sql/statements/buffer_facts.py", 'if not row["is_leased"]', "if True", "distributions are of groups that can be drawn"),
    ("observe-overdue", "storage/sql/statements/buffer_facts.py", "AND g.leased_until <= :now AND", "AND g.leased_until <= :now + 1e9 AND", "a lease that goes on isn't overdue"),
    ("tracing-quotes", "buffer/tracing.py", "_QUOTING_ERRORS = (RolloutError, DecodeError, InputError)", "_QUOTING_ERRORS = (DecodeError,)", "spans quote no rollout"),
    ("tracing-cancelled", "buffer/tracing.py", "if isinstance(error, (asyncio.CancelledError, GeneratorExit)):", "if False:", "a cancelled call is no error"),
]  # fmt: skip

_VIEWS = [
    ("text-behind-the-last", "values/codec/payload_format.py", "self._last_end = position[0] + position[1]", "pass", "texts are found in their order"),
    ("text-with-nul", "values/codec/payload_format.py", 'if "\\x00" in text:', "if False:", "no view fails for a text with NUL"),
    ("places-of-short", "values/rollouts/outline.py", "shown and len(shown) > PREVIEW_CHARS and", "False and", "long responses are whole in SQL"),
]  # fmt: skip

_DIAGNOSIS = [
    ("what-arrives-follows", "rules/diagnosis.py", "return [*slow, *others] if covered else others or slow", "return others or slow", "what arrives comes first"),
    ("failures-of-long-ago", "rules/causes.py", "        if 2 * number < total:\n            return None\n", "", "what failed long ago is no reason now"),
    ("one-of-two-waits", "rules/causes.py", "any(worker.name not in names for worker in about.alive)", "all(worker.name not in names for worker in about.alive)", "it is a deadlock only if all producers wait"),
    ("final-while-one-comes", "rules/causes.py", " and not coming", "", "a wait isn't final while a leased or unfinished group may be completed"),
    ("first-task-is-named", "rules/causes.py", "    explained.sort(key=lambda item: (not item[1][0].cause.final, order.index(item[1][0].cause.reason)))\n", "", "of several tasks the worst is named"),
    ("texts-as-they-are", "common/units.py", "return _cut(escape(\" \"", "return _cut(str(\" \"", "hostile texts stay on their line"),
]  # fmt: skip

_WEB = [
    ("web-escaped", "web/app.py", "autoescape=True", "autoescape=False", "no text becomes markup"),
    ("web-hidden", "web/app.py", "finalize=_template_value", "finalize=None", "hidden characters are shown"),
    ("web-rebinding", "web/server.py", "if not is_loopback(host_of(request.headers)):", "if False:", "other names are refused without a token"),
    ("web-token", "web/server.py", "return hmac.compare_digest(token.encode(errors=\"replace\"), self.token.encode())", "return bool(token)", "only the token opens"),
    ("web-other-host", "web/server.py", 'f"{self.prefix}/" + path_of(request).lstrip("/\\\\")', "self.prefix + path_of(request)", "a token leads to no other host"),
    ("web-host", "web/server.py", "if not _HOST.fullmatch(", "if None and not _HOST.fullmatch(", "no Host header opens the pages"),
    ("web-headers", "web/server.py", "headers[name] = value", "pass", "every answer has the policy"),
    ("web-token-of-host", "cli/stats.py", "elif not server.is_loopback(host):", "elif False:", "who listens elsewhere asks for a token"),
    ("web-turns", "web/server.py", "anyio.CapacityLimiter(AT_ONCE)", "anyio.CapacityLimiter(100)", "few reads at a time"),
    ("web-endless", "web/server.py", "return work(self.reader, self._timeout)", "return work(self.reader, 600.0)", "long reads are stopped"),
    ("web-cut", "view/conversation.py", "cls(text[:characters]", "cls(text[:]", "long texts are cut"),
    ("web-prompt-values", "view/conversation.py", "numbers[-len(ids) :]", "numbers[: len(ids)]", "values of the prompt are left out"),
    ("web-one-buffer", "web/app.py", 'parameters["buffer"] = self._buffer', 'parameters.setdefault("buffer", self._buffer)', "one buffer, whatever is asked for"),
]  # fmt: skip

_RECORD = [
    ("batch-of-quotes", "storage/sql/engine/postgres_dialect.py", "    while tag in ", "    while False and tag in ", "no name ends the literal of a batch"),
    ("batch-stays-undone", "storage/sql/tasks/delivery.py", "if taken.batch is not None:", "if False:", "a draw that nobody received is not kept"),
    ("batch-settled-twice", f"{_STATEMENTS}/leases.py", "settle(tx, lease, [row.uid for row in rows], step)", "settle(tx, lease, list(uids), step)", "what was acknowledged before is passed over"),
    ("holder-stays", f"{_STATEMENTS}/counts.py", '"leased_until": None, "holder": None}', '"leased_until": None}', "a group that came back has no holder"),
    ("step-of-lane-lost", f"{_STATEMENTS}/batches.py", "return max({row.step for row in rows if row.step is not None}, default=None)", "return None", "by default the step is that of the last refresh"),
    ("undone-step-stays", f"{_STATEMENTS}/leases.py", "        THEN :trained ELSE trained_step END", "        THEN trained_step ELSE trained_step END", "a draw that is undone trained nothing"),
    ("lease-of-another", "storage/values.py", "if None not in (lease.database, database) and lease.database != database:", "if False:", "a lease of another store is refused"),
]  # fmt: skip

_FILLING_TASK, _PARTS = "storage/sql/tasks/filling.py", f"{_STATEMENTS}/parts.py"
_FILLING = [
    ("part-of-whole-group", _PARTS, "if len(parts) < len(rows) and (", "if False and (", "a whole group takes no more rollouts"),
    ("part-of-left-group", _PARTS, "(not parts or any(", "(any(", "a group that has left takes no more rollouts"),
    ("name-not-forgotten", _PARTS, "AND since >= :checkpoint AND", "AND since > :checkpoint AND", "a restore lets a group that is undone be filled again"),
    ("part-index-taken", _PARTS, "if part.wanted in taken:", "if False:", "an index is taken once"),
    ("part-other-size", _PARTS, "(other.task_name, other.size, other.least) != (new.task_name, part.size, part.least):", "other.task_name != new.task_name:", "all rollouts of a group agree on its size"),
    ("last-part-stays-apart", _PARTS, "if len(taken) + 1 == part.size and isinstance(part.name, str):", "if False:", "the last rollout makes the group"),
    ("orphans-of-prompts", _PARTS, "if name not in existing for", "if name in () for", "rollouts of prompts that are gone are removed"),
    ("prompt-not-held", _PARTS, "!= [new.lease.token]:", "== []:", "only the holder of a prompt adds rollouts"),
    ("overdue-too-early", _PARTS, "AND archived_at < :before\nORDER", "\nORDER", "a group waits for its rollouts as long as the config says"),
    ("parts-may-be-gone", f"{_STATEMENTS}/eviction.py", "missing += [uid for uid in new.parts if uid not in replaced]", "pass", "a group is made of its stored rollouts once"),
    ("parts-stay", f"{_STATEMENTS}/eviction.py", "replaced |= {uid: stored[uid] for uid in new.parts if uid in stored and not stored[uid].is_leased}", "pass", "a whole group replaces its rollouts"),
    ("rest-lost", f"{_STATEMENTS}/put.py", ", *store(tx, [rest])]", "]", "what a group goes without is kept"),
    ("runs-of-one-name", f"{_STATEMENTS}/put.py", "closed or name in names", "closed", "rollouts of a group are placed one after another"),
    ("order-of-parts", _FILLING_TASK, "for place in sorted(rollouts)]", "for place in rollouts]", "a group has its rollouts by index"),
    ("rule-of-parts-lost", _FILLING_TASK, "None, part.train_step, part.rule)", "None, None, NO_RULE)", "the rule of the last put holds for the group"),
    ("too-few-are-drawable", _FILLING_TASK, "or len(fit) < part.least):", "):", "a group with too few completed rollouts fails"),
    ("fit-too-few", "values/rollouts/normalise.py", "if unfit and len(fit) >= least and", "if unfit and", "a group goes without others only with min_size completed ones"),
    ("fit-unfinished", "values/rollouts/normalise.py", " and len(fit) + len(unfit) == len(entries):", ":", "interrupted rollouts keep a group whole"),
    ("filling-counted", _TRANSITIONS, "{} if place.status == Status.FILLING else {why: 1}", "{why: 1}", "rollouts of a group that fills are counted by the group"),
    ("added-rollouts-stay", "buffer/lease.py", "return [part for uid in uids for part in self._added_parts.get(uid, {}).values()]", "return []", "a finished prompt replaces the rollouts added to it"),
    ("added-rollouts-forgotten", "produce/sampler.py", "prompt.group[index] = rollout", "pass", "a prompt comes back with its finished rollouts"),
    ("failed-are-enough-too-soon", "produce/generations.py", "return min_size is not None and self._is_last(prompt) and", "return min_size is not None and", "a group goes without failed rollouts after its last attempt"),
]  # fmt: skip

_FORKS = [
    ("fork-without-locks", f"{_ENGINE}/sqlite_raw.py", "if not (pipe and _lock_as_open(path, self._lock_files))", "if False", "what a forked process commits after its parent has closed is kept"),
    ("fork-without-descriptors", f"{_ENGINE}/sqlite_raw.py", "            return False\n    return True\n", "            continue\n    return True\n", "a fork that could have no locks writes nothing"),
    ("fork-of-a-fork-without-locks", f"{_ENGINE}/sqlite_raw.py", "self._unlocked_paths.union(without)", "frozenset(without)", "nor does its own fork"),
    ("fork-before-who-waits", f"{_ENGINE}/sqlite_raw.py", "            self._condition.wait_for(lambda: not self._waiting_count, LONGEST_SECONDS)\n", "", "a transaction that waits for a fork comes before the next one"),
    ("fork-waits-for-itself", f"{_ENGINE}/sqlite_raw.py", " and not self._of_thread.depth:", ":", "a connection that fails to open beside a fork is closed at once"),
    ("fork-keeps-lock-files", f"{_ENGINE}/sqlite_raw.py", "if not _is_open(files.get(file), file):", "if True:", "forks of forks have no more descriptors than forks"),
    ("fork-keeps-connections", f"{_ENGINE}/thread.py", "os.dup2(nothing.fileno(), own.fileno(), inheritable=False)", "pass", "a server notices that a process has died, whatever lives on that it has forked"),
    ("fork-keeps-held-locks", "common/forks.py", "lock._lock = threading.RLock()", "pass", "a lock that another thread holds is free in a fork"),
]  # fmt: skip

MUTATIONS = [
    Mutation(name, area, file, old, new, law)
    for area, mutations in {
        "rules": _RULES,
        "races": _RACES,
        "rollouts": _ROLLOUTS,
        "query": _QUERY,
        "codec": _CODEC,
        "sql": _SQL,
        "failover": _FAILOVER,
        "owner": _OWNER,
        "prompts": _PROMPTS,
        "produce": _PRODUCE,
        "observe": _OBSERVE,
        "views": _VIEWS,
        "diagnosis": _DIAGNOSIS,
        "web": _WEB,
        "record": _RECORD,
        "filling": _FILLING,
        "forks": _FORKS,
    }.items()
    for name, file, old, new, law in mutations
]


NEAR = {
    "forks": ("tests/buffer/test_forks.py",),
    "rules": (
        "tests/rules/test_rules.py",
        "tests/rules/test_transitions.py",
        "tests/contract/test_contract.py::TestSqlite",
    ),
    "races": (
        "tests/rules/test_rules.py",
        "tests/contract/test_contract.py::TestModel",
        "tests/storage/test_same_draws.py",
        "-k",
        "not postgres",
    ),
    "rollouts": (
        "tests/rollouts",
        "tests/contract/test_contract.py::TestModel",
        "tests/storage/test_views.py",
    ),
    "query": ("tests/query", "-k", "not postgres"),
    "codec": ("tests/codec", "tests/values/test_object_refs.py", "-k", "not postgres"),
    "sql": (
        "tests/contract/test_contract.py::TestSqlite",
        "tests/storage/test_locks.py",
        "tests/storage/test_same_draws.py",
        "tests/storage/test_checkpoints.py",
        "tests/storage/test_history.py",
        "tests/produce/test_coming_back.py",
        "tests/produce/test_datasets.py",
        "tests/buffer/test_buffers.py",
        "tests/storage/test_snapshots.py",
        "tests/storage/test_draws.py",
        "tests/storage/test_lease_clock.py",
        "tests/side_by_side/test_statemachine.py",
        "-k",
        "not postgres",
    ),
    "filling": (
        "tests/buffer/test_filling.py",
        "tests/rules/test_transitions.py",
        "tests/produce/test_by_rollout.py",
        "-k",
        "not postgres",
    ),
    "failover": (
        "tests/test_hosts.py",
        "tests/faults/test_postgres_connections.py",
        "tests/storage/test_schema.py",
        "tests/cluster",
    ),
    "owner": (
        "tests/buffer/test_put_many.py",
        "tests/cancellation",
        "tests/contract/test_contract.py::TestSqlite",
        "tests/faults/test_postgres_restarts.py",
    ),
    "prompts": ("tests/produce", "-k", "not postgres"),
    "produce": ("tests/produce", "-k", "not postgres"),
    "observe": ("tests/observe", "-k", "not postgres"),
    "diagnosis": ("tests/rules/test_diagnosis.py", "tests/storage/test_circumstances.py", "-k", "not postgres"),
    "record": ("tests/storage/test_batches.py", "tests/contract/test_contract.py::TestSqlite"),
    "views": ("tests/storage/test_views.py", "-k", "not postgres"),
    "web": ("tests/web", "tests/test_common.py", "-k", "not postgres"),
}
