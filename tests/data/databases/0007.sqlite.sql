PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE rb_lane (
	id INTEGER NOT NULL, 
	buffer TEXT NOT NULL, 
	task_name TEXT NOT NULL, 
	status TEXT NOT NULL, 
	leased BOOLEAN NOT NULL, 
	step BIGINT, 
	uniform_clock FLOAT, 
	prioritized_clock FLOAT, 
	idle_clock FLOAT, 
	PRIMARY KEY (id), 
	CONSTRAINT rb_lane_of_task UNIQUE (buffer, task_name, status, leased)
);
INSERT INTO rb_lane VALUES(1,'default','math','completed',0,8,NULL,NULL,NULL);
INSERT INTO rb_lane VALUES(2,'default','code','completed',0,8,NULL,NULL,NULL);
INSERT INTO rb_lane VALUES(3,'default','math','filtered',0,NULL,NULL,NULL,NULL);
INSERT INTO rb_lane VALUES(4,'default','math','expired',0,NULL,NULL,NULL,NULL);
INSERT INTO rb_lane VALUES(5,'default','code','completed',1,NULL,NULL,NULL,NULL);
CREATE TABLE rb_group (
	uid INTEGER NOT NULL, 
	lane INTEGER NOT NULL, 
	oldest_step BIGINT, 
	pinned_staleness BIGINT, 
	pinned_step BIGINT, 
	mixed BOOLEAN NOT NULL, 
	priority FLOAT NOT NULL, 
	times_sampled INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	reward FLOAT, 
	bytes BIGINT NOT NULL, 
	marks JSON NOT NULL, 
	tags JSON, 
	scoped_key TEXT, 
	error TEXT, 
	uniform_key FLOAT, 
	prioritized_key FLOAT, 
	deliveries INTEGER DEFAULT 0 NOT NULL, 
	lease BIGINT, 
	leased_until FLOAT, 
	archived_at FLOAT, 
	ticket BIGINT, 
	made_from JSON, 
	worker TEXT, 
	put_step BIGINT, 
	holder TEXT, 
	trained_step BIGINT, 
	PRIMARY KEY (uid)
);
INSERT INTO rb_group VALUES(1,4,NULL,6,NULL,0,1.0,0,1795618542.6867213248,NULL,372,'{"oldest":[null,null],"newest":[null,null],"reward":[null,null],"expired":[true,true],"staleness":[6,6]}','{"level":1}','["math", "prompt é1", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_group VALUES(2,5,2,5,8,0,1.0,2,1795618542.7105619907,0.5,372,'{"oldest":[2,2],"newest":[2,2],"reward":[1.0,0.0]}','{"level":2}','["code", "prompt é2", "default"]',NULL,NULL,NULL,1,8,1795618602.8040683269,NULL,NULL,NULL,'vm:20043',7,'vm:20043',8);
INSERT INTO rb_group VALUES(3,1,3,NULL,NULL,0,1.0,1,1795618542.7132377624,0.5,372,'{"oldest":[3,3],"newest":[3,3],"reward":[1.0,0.0]}','{"level":3}','["math", "prompt é3", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,8);
INSERT INTO rb_group VALUES(4,2,4,NULL,NULL,0,1.0,0,1795618542.7150814533,0.5,373,'{"oldest":[4,4],"newest":[4,4],"reward":[1.0,0.0]}','{"level":4}','["code", "prompt é4", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_group VALUES(5,1,5,NULL,NULL,0,1.0,0,1795618542.7162220478,0.5,374,'{"oldest":[5,5],"newest":[5,5],"reward":[1.0,0.0]}','{"level":5}','["math", "prompt é5", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_group VALUES(6,2,6,NULL,NULL,0,1.0,0,1795618542.71712327,0.5,374,'{"oldest":[6,6],"newest":[6,6],"reward":[1.0,0.0]}','{"level":6}','["code", "prompt é6", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_group VALUES(7,3,NULL,0,NULL,0,1.0,0,1795618542.7181277275,0.5,322,'{"oldest":[null,null],"newest":[null,null],"reward":[1.0,0.0]}',NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,1795618542.7181277275,NULL,NULL,'vm:20043',NULL,NULL,NULL);
CREATE TABLE rb_payload (
	uid INTEGER NOT NULL, 
	outline JSON NOT NULL, 
	prompt TEXT, 
	data BLOB NOT NULL, 
	PRIMARY KEY (uid)
);
INSERT INTO rb_payload VALUES(1,'[{"id":1,"status":"completed","staleness":5,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"6"},{"id":1,"status":"completed","staleness":5,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"7"}]','1+5=',X'52504c4202000000020000005c01000000000000e698e63ca600000000000000a6000000000000008aaa726f6c6c6f75745f696401a375696401a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4312b353da8726573706f6e7365a136ac726573706f6e73655f696473920105b4726573706f6e73655f6d6f64656c5f7374657073920101ad7365715f7374616c656e65737305a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696401a375696401a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4312b353da8726573706f6e7365a137ac726573706f6e73655f696473920106b4726573706f6e73655f6d6f64656c5f7374657073920101ad7365715f7374616c656e65737305a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(2,'[{"id":2,"status":"completed","staleness":4,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"7"},{"id":2,"status":"completed","staleness":4,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"8"}]','2+5=',X'52504c4202000000020000005c010000000000003669a347a600000000000000a6000000000000008aaa726f6c6c6f75745f696402a375696402a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4322b353da8726573706f6e7365a137ac726573706f6e73655f696473920205b4726573706f6e73655f6d6f64656c5f7374657073920202ad7365715f7374616c656e65737304a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696402a375696402a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4322b353da8726573706f6e7365a138ac726573706f6e73655f696473920206b4726573706f6e73655f6d6f64656c5f7374657073920202ad7365715f7374616c656e65737304a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(3,'[{"id":3,"status":"completed","staleness":3,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"8"},{"id":3,"status":"completed","staleness":3,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"9"}]','3+5=',X'52504c4202000000020000005c01000000000000aa004894a600000000000000a6000000000000008aaa726f6c6c6f75745f696403a375696403a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4332b353da8726573706f6e7365a138ac726573706f6e73655f696473920305b4726573706f6e73655f6d6f64656c5f7374657073920303ad7365715f7374616c656e65737303a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696403a375696403a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4332b353da8726573706f6e7365a139ac726573706f6e73655f696473920306b4726573706f6e73655f6d6f64656c5f7374657073920303ad7365715f7374616c656e65737303a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(4,'[{"id":4,"status":"completed","staleness":2,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"9"},{"id":4,"status":"completed","staleness":2,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"10"}]','4+5=',X'52504c4202000000020000005d010000000000002536246ca600000000000000a7000000000000008aaa726f6c6c6f75745f696404a375696404a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4342b353da8726573706f6e7365a139ac726573706f6e73655f696473920405b4726573706f6e73655f6d6f64656c5f7374657073920404ad7365715f7374616c656e65737302a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696404a375696404a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4342b353da8726573706f6e7365a23130ac726573706f6e73655f696473920406b4726573706f6e73655f6d6f64656c5f7374657073920404ad7365715f7374616c656e65737302a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(5,'[{"id":5,"status":"completed","staleness":1,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"10"},{"id":5,"status":"completed","staleness":1,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"11"}]','5+5=',X'52504c4202000000020000005e0100000000000090066030a700000000000000a7000000000000008aaa726f6c6c6f75745f696405a375696405a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4352b353da8726573706f6e7365a23130ac726573706f6e73655f696473920505b4726573706f6e73655f6d6f64656c5f7374657073920505ad7365715f7374616c656e65737301a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696405a375696405a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4352b353da8726573706f6e7365a23131ac726573706f6e73655f696473920506b4726573706f6e73655f6d6f64656c5f7374657073920505ad7365715f7374616c656e65737301a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(6,'[{"id":6,"status":"completed","staleness":0,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"11"},{"id":6,"status":"completed","staleness":0,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"12"}]','6+5=',X'52504c4202000000020000005e010000000000007c4485f4a700000000000000a7000000000000008aaa726f6c6c6f75745f696406a375696406a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4362b353da8726573706f6e7365a23131ac726573706f6e73655f696473920605b4726573706f6e73655f6d6f64656c5f7374657073920606ad7365715f7374616c656e65737300a6726577617264cb3ff0000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696406a375696406a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4362b353da8726573706f6e7365a23132ac726573706f6e73655f696473920606b4726573706f6e73655f6d6f64656c5f7374657073920606ad7365715f7374616c656e65737300a6726577617264cb0000000000000000a6737461747573c7091b636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO rb_payload VALUES(7,'[{"id":7,"status":"filtered","staleness":0,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"12"},{"id":7,"status":"filtered","staleness":0,"prompt_tokens":0,"response_tokens":2,"finish_reason":null,"response":"13"}]','7+5=',X'52504c4202000000020000002a01000000000000969e47c78d000000000000008d0000000000000089aa726f6c6c6f75745f696407a375696407a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4372b353da8726573706f6e7365a23132ac726573706f6e73655f696473920705ad7365715f7374616c656e65737300a6726577617264cb3ff0000000000000a6737461747573d71b66696c7465726564ac65787472615f6669656c64738089aa726f6c6c6f75745f696407a375696407a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4372b353da8726573706f6e7365a23133ac726573706f6e73655f696473920706ad7365715f7374616c656e65737300a6726577617264cb0000000000000000a6737461747573d71b66696c7465726564ac65787472615f6669656c647380');
CREATE TABLE rb_garbage (
	uid INTEGER NOT NULL, 
	removed_at FLOAT NOT NULL, 
	PRIMARY KEY (uid)
);
CREATE TABLE rb_tally (
	lane INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	shard INTEGER NOT NULL, 
	amount BIGINT NOT NULL, 
	PRIMARY KEY (lane, name, shard)
);
INSERT INTO rb_tally VALUES(1,'put',0,3);
INSERT INTO rb_tally VALUES(1,'size',0,2);
INSERT INTO rb_tally VALUES(2,'put',0,3);
INSERT INTO rb_tally VALUES(2,'size',0,2);
INSERT INTO rb_tally VALUES(3,'put',0,1);
INSERT INTO rb_tally VALUES(3,'size',0,1);
INSERT INTO rb_tally VALUES(1,'expired',0,1);
INSERT INTO rb_tally VALUES(4,'size',0,1);
INSERT INTO rb_tally VALUES(1,'sampled_new',0,1);
INSERT INTO rb_tally VALUES(2,'sampled_new',0,1);
INSERT INTO rb_tally VALUES(2,'sampled_again',0,1);
INSERT INTO rb_tally VALUES(2,'leased',0,1);
CREATE TABLE rb_counter (
	name TEXT NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO rb_counter VALUES('uid',8);
CREATE TABLE rb_buffer (
	name TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	ticket_shift BIGINT NOT NULL, 
	restored_step BIGINT, 
	restored_at FLOAT, 
	PRIMARY KEY (name)
);
CREATE TABLE rb_cursor (
	buffer TEXT NOT NULL, 
	name TEXT NOT NULL, 
	checkpoint INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	position BIGINT NOT NULL, 
	value BLOB NOT NULL, 
	PRIMARY KEY (buffer, name, checkpoint)
);
CREATE TABLE rb_checkpoint (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	buffer TEXT NOT NULL, 
	step BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	groups BIGINT NOT NULL, 
	bytes BIGINT NOT NULL, 
	next_ticket BIGINT NOT NULL, 
	lanes JSON NOT NULL, 
	tallies JSON NOT NULL, 
	copied_to BIGINT
);
INSERT INTO rb_checkpoint VALUES(1,'default',8,1795618542.7537810802,7,2559,8,'[{"id":1,"buffer":"default","task_name":"math","status":"completed","leased":false,"step":8,"uniform_clock":null,"prioritized_clock":null,"idle_clock":null},{"id":2,"buffer":"default","task_name":"code","status":"completed","leased":false,"step":8,"uniform_clock":null,"prioritized_clock":null,"idle_clock":null},{"id":3,"buffer":"default","task_name":"math","status":"filtered","leased":false,"step":null,"uniform_clock":null,"prioritized_clock":null,"idle_clock":null},{"id":4,"buffer":"default","task_name":"math","status":"expired","leased":false,"step":null,"uniform_clock":null,"prioritized_clock":null,"idle_clock":null}]','[{"lane":1,"name":"expired","amount":1},{"lane":1,"name":"put","amount":3},{"lane":1,"name":"size","amount":2},{"lane":2,"name":"put","amount":3},{"lane":2,"name":"size","amount":3},{"lane":3,"name":"put","amount":1},{"lane":3,"name":"size","amount":1},{"lane":4,"name":"size","amount":1}]',NULL);
CREATE TABLE rb_checkpoint_group (
	checkpoint INTEGER NOT NULL, 
	uid INTEGER NOT NULL, 
	lane INTEGER NOT NULL, 
	oldest_step BIGINT, 
	pinned_staleness BIGINT, 
	pinned_step BIGINT, 
	mixed BOOLEAN NOT NULL, 
	priority FLOAT NOT NULL, 
	times_sampled INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	reward FLOAT, 
	bytes BIGINT NOT NULL, 
	marks JSON NOT NULL, 
	tags JSON, 
	scoped_key TEXT, 
	error TEXT, 
	uniform_key FLOAT, 
	prioritized_key FLOAT, 
	deliveries INTEGER NOT NULL, 
	lease BIGINT, 
	leased_until FLOAT, 
	archived_at FLOAT, 
	ticket BIGINT, 
	made_from JSON, 
	worker TEXT, 
	put_step BIGINT, 
	holder TEXT, 
	trained_step BIGINT, 
	PRIMARY KEY (checkpoint, uid)
)
 WITHOUT ROWID

;
INSERT INTO rb_checkpoint_group VALUES(1,1,4,NULL,6,NULL,0,1.0,0,1795618542.6867213248,NULL,372,'{"oldest":[null,null],"newest":[null,null],"reward":[null,null],"expired":[true,true],"staleness":[6,6]}','{"level":1}','["math", "prompt é1", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,2,2,2,NULL,NULL,0,1.0,0,1795618542.7105619907,0.5,372,'{"oldest":[2,2],"newest":[2,2],"reward":[1.0,0.0]}','{"level":2}','["code", "prompt é2", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,3,1,3,NULL,NULL,0,1.0,0,1795618542.7132377624,0.5,372,'{"oldest":[3,3],"newest":[3,3],"reward":[1.0,0.0]}','{"level":3}','["math", "prompt é3", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,4,2,4,NULL,NULL,0,1.0,0,1795618542.7150814533,0.5,373,'{"oldest":[4,4],"newest":[4,4],"reward":[1.0,0.0]}','{"level":4}','["code", "prompt é4", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,5,1,5,NULL,NULL,0,1.0,0,1795618542.7162220478,0.5,374,'{"oldest":[5,5],"newest":[5,5],"reward":[1.0,0.0]}','{"level":5}','["math", "prompt é5", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,6,2,6,NULL,NULL,0,1.0,0,1795618542.71712327,0.5,374,'{"oldest":[6,6],"newest":[6,6],"reward":[1.0,0.0]}','{"level":6}','["code", "prompt é6", "default"]',NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,'vm:20043',7,NULL,NULL);
INSERT INTO rb_checkpoint_group VALUES(1,7,3,NULL,0,NULL,0,1.0,0,1795618542.7181277275,0.5,322,'{"oldest":[null,null],"newest":[null,null],"reward":[1.0,0.0]}',NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,1795618542.7181277275,NULL,NULL,'vm:20043',NULL,NULL,NULL);
CREATE TABLE rb_info (
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO rb_info VALUES('identity','9737598a91864fc9ab08e6f5bb127c5d');
INSERT INTO rb_info VALUES('start of c139a488-7f30-4c80-a560-fc93255c7411 time:[4026531834]','1795598940.8303194');
CREATE TABLE rb_batch (
	id INTEGER NOT NULL, 
	buffer TEXT NOT NULL, 
	taken_at FLOAT NOT NULL, 
	epoch BIGINT NOT NULL, 
	step BIGINT, 
	status TEXT NOT NULL, 
	worker TEXT, 
	lease BIGINT, 
	groups INTEGER NOT NULL, 
	settled INTEGER NOT NULL, 
	reward FLOAT, 
	min_reward FLOAT, 
	max_reward FLOAT, 
	staleness FLOAT, 
	max_staleness BIGINT, 
	oldest_step BIGINT, 
	newest_step BIGINT, 
	first_uid BIGINT NOT NULL, 
	last_uid BIGINT NOT NULL, 
	members JSON NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO rb_batch VALUES(1,'default',1795618542.8007690906,0,8,'completed','vm:20043',NULL,1,1,0.5,0.5,0.5,4.0,4,3,3,3,3,'[[3,1,"vm:20043",0.5,4,3,1795618542.7132378]]');
INSERT INTO rb_batch VALUES(2,'default',1795618542.8027527331,0,8,'completed','vm:20043',NULL,1,1,0.5,0.5,0.5,5.0,5,2,2,2,2,'[[2,2,"vm:20043",0.5,5,2,1795618542.710562]]');
INSERT INTO rb_batch VALUES(3,'default',1795618542.8065884112,0,8,'completed','vm:20043',8,1,0,0.5,0.5,0.5,5.0,5,2,2,2,2,'[[2,2,"vm:20043",0.5,5,2,1795618542.710562]]');
CREATE TABLE rb_worker (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	buffer TEXT NOT NULL, 
	name TEXT NOT NULL, 
	host TEXT NOT NULL, 
	pid BIGINT NOT NULL, 
	started_at FLOAT NOT NULL, 
	seen_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	CONSTRAINT rb_worker_of_process UNIQUE (buffer, name, host, pid)
);
INSERT INTO rb_worker VALUES(1,'default','vm:20043','vm',20043,1795618542.654416561,1795618542.722597599,NULL);
CREATE TABLE rb_activity (
	worker_id INTEGER NOT NULL, 
	since BIGINT NOT NULL, 
	groups BIGINT NOT NULL, 
	rollouts BIGINT NOT NULL, 
	tokens BIGINT NOT NULL, 
	failures BIGINT NOT NULL, 
	taken BIGINT NOT NULL, 
	PRIMARY KEY (worker_id, since)
);
INSERT INTO rb_activity VALUES(1,1795618500,7,14,28,0,0);
CREATE TABLE rb_waiter (
	worker_id INTEGER NOT NULL, 
	number BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	wants JSON NOT NULL, 
	status TEXT, 
	"query" TEXT, 
	since FLOAT NOT NULL, 
	deadline FLOAT, 
	seen_at FLOAT NOT NULL, 
	limits JSON NOT NULL, 
	reason TEXT NOT NULL, 
	PRIMARY KEY (worker_id, number)
);
CREATE TABLE rb_event (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	buffer TEXT NOT NULL, 
	happened_at FLOAT NOT NULL, 
	kind TEXT NOT NULL, 
	task_name TEXT, 
	worker TEXT, 
	step BIGINT, 
	groups BIGINT NOT NULL, 
	uids JSON, 
	detail TEXT
);
INSERT INTO rb_event VALUES(1,'default',1795618542.7277839184,'limits',NULL,'vm:20043',NULL,0,NULL,'{"max_times_sampled": 2, "archive_groups": 10}');
INSERT INTO rb_event VALUES(2,'default',1795618542.737650156,'expired','math','vm:20043',8,1,'[1]',NULL);
INSERT INTO rb_event VALUES(3,'default',1795618542.7786724566,'checkpoint',NULL,'vm:20043',8,7,NULL,NULL);
CREATE TABLE rb_history (
	buffer TEXT NOT NULL, 
	since BIGINT NOT NULL, 
	data JSON NOT NULL, 
	PRIMARY KEY (buffer, since)
);
INSERT INTO rb_history VALUES('default',1795618500,'{"at":1795618542.739725,"tasks":{"code":{"buffered":{"init":0,"completed":3,"aborted":0,"expired":0,"failed":0,"filtered":0},"put":3,"put_of":{"completed":3},"expired_ever":0},"math":{"buffered":{"init":0,"completed":2,"aborted":0,"expired":1,"failed":0,"filtered":1},"put":4,"expired":1,"put_of":{"completed":3,"filtered":1},"expired_ever":1}}}');
CREATE TABLE rb_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT rb_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO rb_version VALUES('0007');
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('rb_worker',1);
INSERT INTO sqlite_sequence VALUES('rb_event',3);
INSERT INTO sqlite_sequence VALUES('rb_checkpoint',1);
CREATE INDEX rb_group_by_pinned ON rb_group (lane, pinned_staleness DESC, uid) WHERE pinned_staleness IS NOT NULL;
CREATE INDEX rb_group_leased ON rb_group (leased_until) WHERE leased_until IS NOT NULL;
CREATE UNIQUE INDEX rb_group_key ON rb_group (scoped_key) WHERE scoped_key IS NOT NULL;
CREATE INDEX rb_group_archived ON rb_group (lane, archived_at, uid) WHERE archived_at IS NOT NULL;
CREATE INDEX rb_group_unsettled ON rb_group (lane) WHERE pinned_staleness IS NOT NULL AND (oldest_step IS NOT NULL OR pinned_step IS NULL);
CREATE INDEX rb_group_by_prioritized_key ON rb_group (lane, prioritized_key, uid, priority) WHERE prioritized_key IS NOT NULL;
CREATE INDEX rb_group_by_uniform_key ON rb_group (lane, uniform_key, uid) WHERE uniform_key IS NOT NULL;
CREATE INDEX rb_group_in_order ON rb_group (lane, uid);
CREATE INDEX rb_group_by_step ON rb_group (lane, oldest_step, uid) WHERE pinned_staleness IS NULL;
CREATE INDEX rb_garbage_in_order ON rb_garbage (removed_at);
CREATE UNIQUE INDEX rb_checkpoint_of_step ON rb_checkpoint (buffer, step) WHERE copied_to IS NULL;
CREATE INDEX rb_batch_by_step ON rb_batch (step, buffer);
CREATE INDEX rb_batch_by_lease ON rb_batch (lease) WHERE lease IS NOT NULL;
CREATE INDEX rb_event_by_time ON rb_event (buffer, happened_at);
CREATE VIEW groups AS
SELECT
    g.uid AS uid,
    g.uid AS timestamp_id,
    l.buffer AS buffer,
    l.task_name AS task_name,
    l.status AS status,
    CAST(CASE WHEN g.pinned_staleness IS NOT NULL THEN g.pinned_staleness ELSE l.step - g.oldest_step - 1 END AS INTEGER) AS staleness,
    g.priority AS priority,
    g.times_sampled AS times_sampled,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.created_at, 'unixepoch') AS TEXT) AS created_at,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.leased_until, 'unixepoch') AS TEXT) AS leased_until,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.archived_at, 'unixepoch') AS TEXT) AS archived_at,
    g.deliveries AS deliveries,
    g.reward AS reward,
    CAST(json_array_length(g.marks, '$.oldest') AS INTEGER) AS rollouts,
    CAST((SELECT sum(json_extract(r.value, '$.prompt_tokens')) FROM json_each(p.outline) r) AS INTEGER)
      AS prompt_tokens,
    CAST((SELECT coalesce(sum(json_extract(r.value, '$.response_tokens')), 0) FROM json_each(p.outline) r
      WHERE coalesce(json_extract(g.marks, '$.expired[' || r.key || ']'), 0) = 0) AS INTEGER)
      AS response_tokens,
    CAST((SELECT group_concat(reason || ':' || times, ' ') FROM (
        SELECT json_extract(r.value, '$.finish_reason') AS reason, count(1) AS times FROM json_each(p.outline) r
         WHERE coalesce(json_extract(g.marks, '$.expired[' || r.key || ']'), 0) = 0
           AND json_extract(r.value, '$.finish_reason') IS NOT NULL
         GROUP BY reason ORDER BY reason)) AS TEXT) AS finish_reasons,
    p.prompt AS prompt,
    CAST(CASE WHEN coalesce(json_extract(g.marks, '$.expired[0]'), 0) THEN ''
              ELSE json_extract(p.outline, '$[0].response') END AS TEXT) AS response,
    g.tags AS tags,
    CAST(json_extract(g.scoped_key, '$[1]') AS TEXT) AS key,
    CAST(CASE WHEN g.error IS NULL AND l.status = 'failed' THEN
      (SELECT json_extract(r.value, '$.error_msg') FROM json_each(p.outline) r
        WHERE json_extract(r.value, '$.error_msg') IS NOT NULL ORDER BY r.key LIMIT 1)
      ELSE g.error END AS TEXT) AS error,
    g.bytes AS bytes,
    g.worker AS worker,
    g.put_step AS put_step,
    g.holder AS leased_by,
    g.trained_step AS trained_step,
    CAST(CASE
      WHEN length(p.prompt) <= 200 THEN p.prompt
      WHEN length(p.data) = g.bytes
      THEN substr(p.data, json_extract(p.outline, '$[0].prompt_at[0]') + 1, json_extract(p.outline, '$[0].prompt_at[1]'))
      END AS TEXT) AS full_prompt,
    CAST(CASE WHEN json_type(p.outline, '$[0].messages') IS NOT NULL AND length(p.data) = g.bytes THEN
      (SELECT json_group_array(json_object('role', json_extract(m.value, '$[0]'), 'content', CAST(
          substr(p.data, json_extract(m.value, '$[1]') + 1, json_extract(m.value, '$[2]')) AS TEXT)))
         FROM json_each(p.outline, '$[0].messages') m)
      END AS TEXT) AS messages
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid;
CREATE VIEW rollouts AS
SELECT
    r.uid AS uid,
    CAST(r.position AS INTEGER) AS position,
    r.buffer AS buffer,
    r.task_name AS task_name,
    CAST(json_extract(r.outline, '$.id') AS TEXT) AS rollout_id,
    CAST(CASE WHEN r.expired THEN 'expired' ELSE json_extract(r.outline, '$.status') END AS TEXT) AS status,
    CAST(CASE WHEN r.step IS NOT NULL THEN coalesce(r.step - r.oldest_step - 1, 0)
              ELSE coalesce(r.staleness, json_extract(r.outline, '$.staleness')) END AS INTEGER) AS staleness,
    CAST(r.oldest_step AS INTEGER) AS oldest_model_step,
    CAST(r.reward AS REAL) AS reward,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.rewards') END AS TEXT) AS rewards,
    CAST(json_extract(r.outline, '$.prompt_tokens') AS INTEGER) AS prompt_tokens,
    CAST(CASE WHEN r.expired THEN 0 ELSE json_extract(r.outline, '$.response_tokens') END AS INTEGER)
      AS response_tokens,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.finish_reason') END AS TEXT) AS finish_reason,
    r.prompt AS prompt,
    CAST(CASE WHEN r.expired THEN '' ELSE json_extract(r.outline, '$.response') END AS TEXT) AS response,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.error_msg') END AS TEXT) AS error_msg,
    CAST(CASE WHEN r.expired THEN NULL ELSE r.full_response END AS TEXT) AS full_response,
    r.worker AS worker
FROM (
    SELECT
        g.uid AS uid, o.key AS position, o.value AS outline, l.buffer AS buffer, l.task_name AS task_name,
        p.prompt AS prompt, g.worker AS worker,
        CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END AS step,
        json_extract(g.marks, '$.oldest[' || o.key || ']') AS oldest_step,
        json_extract(g.marks, '$.reward[' || o.key || ']') AS reward,
        json_extract(g.marks, '$.staleness[' || o.key || ']') AS staleness,
        coalesce(json_extract(g.marks, '$.expired[' || o.key || ']'), 0) AS expired,
        CAST(CASE
      WHEN length(json_extract(o.value, '$.response')) <= 200 THEN json_extract(o.value, '$.response')
      WHEN length(p.data) = g.bytes
      THEN substr(p.data, json_extract(o.value, '$.response_at[0]') + 1, json_extract(o.value, '$.response_at[1]'))
      END AS TEXT) AS full_response
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane JOIN rb_payload p ON p.uid = g.uid, json_each(p.outline) o
) r;
CREATE VIEW batches AS
SELECT
    b.id AS id, b.buffer AS buffer, CAST(strftime('%Y-%m-%d %H:%M:%f', b.taken_at, 'unixepoch') AS TEXT) AS taken_at, b.step AS step, b.status AS status, b.worker AS worker,
    b.lease AS lease, 
    CAST((SELECT group_concat(task_name || ':' || times, ' ') FROM (
        SELECT l.task_name AS task_name, count(1) AS times
          FROM json_each(b.members) m JOIN rb_lane l ON l.id = json_extract(m.value, '$[1]')
         GROUP BY l.task_name ORDER BY l.task_name)) AS TEXT) AS tasks,
    b.groups AS groups, b.settled AS settled, b.reward AS reward, b.min_reward AS min_reward,
    b.max_reward AS max_reward, b.staleness AS staleness, b.max_staleness AS max_staleness,
    b.oldest_step AS oldest_model_step, b.newest_step AS newest_model_step, b.epoch AS restores,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b;
CREATE VIEW batch_groups AS
SELECT b.id AS batch, b.buffer AS buffer, b.step AS step, b.worker AS taken_by, 
    CAST(json_extract(m.value, '$[0]') AS INTEGER) AS uid, l.task_name AS task_name,
    CAST(json_extract(m.value, '$[2]') AS TEXT) AS worker,
    CAST(json_extract(m.value, '$[3]') AS REAL) AS reward,
    CAST(json_extract(m.value, '$[4]') AS INTEGER) AS staleness,
    CAST(json_extract(m.value, '$[5]') AS INTEGER) AS oldest_model_step,
    CAST(strftime('%Y-%m-%d %H:%M:%f', json_extract(m.value, '$[6]'), 'unixepoch') AS TEXT) AS created_at,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b, json_each(b.members) m LEFT JOIN rb_lane l ON l.id = json_extract(m.value, '$[1]');
CREATE VIEW leases AS
SELECT
    held.lease AS lease, held.buffer AS buffer, held.task_name AS task_name, held.status AS status,
    held.holder AS worker, CAST(strftime('%Y-%m-%d %H:%M:%f', (SELECT min(b.taken_at) FROM rb_batch b WHERE b.lease = held.lease), 'unixepoch') AS TEXT) AS since, CAST(strftime('%Y-%m-%d %H:%M:%f', held.leased_until, 'unixepoch') AS TEXT) AS until,
    CAST(held.groups AS INTEGER) AS groups, CAST(held.deliveries AS INTEGER) AS deliveries,
    CAST((SELECT max(b.step) FROM rb_batch b WHERE b.lease = held.lease) AS INTEGER) AS step
FROM (
    SELECT
        g.lease AS lease, l.buffer AS buffer, l.task_name AS task_name, l.status AS status, g.holder AS holder,
        min(g.leased_until) AS leased_until, count(1) AS groups, max(g.deliveries) AS deliveries
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane
    WHERE g.leased_until IS NOT NULL
    GROUP BY g.lease, l.buffer, l.task_name, l.status, g.holder
) held;
CREATE VIEW checkpoints AS
SELECT c.buffer AS buffer, c.step AS step, CAST(strftime('%Y-%m-%d %H:%M:%f', c.created_at, 'unixepoch') AS TEXT) AS created_at, c.groups AS groups, c.bytes AS bytes
FROM rb_checkpoint c WHERE c.copied_to IS NULL;
CREATE VIEW waiters AS
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid, a.kind AS kind, a.wants AS wants,
    a.status AS status, a.query AS query, CAST(strftime('%Y-%m-%d %H:%M:%f', a.since, 'unixepoch') AS TEXT) AS since, CAST(strftime('%Y-%m-%d %H:%M:%f', a.deadline, 'unixepoch') AS TEXT) AS deadline, CAST(strftime('%Y-%m-%d %H:%M:%f', a.seen_at, 'unixepoch') AS TEXT) AS seen_at,
    a.reason AS reason, a.limits AS limits
FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id;
CREATE VIEW workers AS
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid,
    CAST(strftime('%Y-%m-%d %H:%M:%f', w.started_at, 'unixepoch') AS TEXT) AS started_at, CAST(strftime('%Y-%m-%d %H:%M:%f', w.seen_at, 'unixepoch') AS TEXT) AS last_seen, CAST(strftime('%Y-%m-%d %H:%M:%f', w.ended_at, 'unixepoch') AS TEXT) AS ended_at, CAST(coalesce(sum(a.groups), 0) AS INTEGER) AS groups_last_hour, CAST(coalesce(sum(a.rollouts), 0) AS INTEGER) AS rollouts_last_hour, CAST(coalesce(sum(a.tokens), 0) AS INTEGER) AS tokens_last_hour, CAST(coalesce(sum(a.failures), 0) AS INTEGER) AS failures_last_hour, CAST(coalesce(sum(a.taken), 0) AS INTEGER) AS taken_last_hour
FROM rb_worker w
    LEFT JOIN rb_activity a ON a.worker_id = w.id AND a.since > (julianday('now') - 2440587.5) * 86400.0 - 3600 - 300
GROUP BY w.id, w.buffer, w.name, w.host, w.pid, w.started_at, w.seen_at, w.ended_at;
CREATE VIEW events AS
SELECT
    e.id AS id, e.buffer AS buffer, CAST(strftime('%Y-%m-%d %H:%M:%f', e.happened_at, 'unixepoch') AS TEXT) AS happened_at, e.kind AS kind, e.task_name AS task_name,
    e.worker AS worker, e.step AS step, e.groups AS groups, e.uids AS uids, e.detail AS detail
FROM rb_event e;
COMMIT;
