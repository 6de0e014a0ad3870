--
-- PostgreSQL database dump
--

\restrict blBlhDo5bo2RciITUxVCqDIiGhiaE2uAkqkls9faKcMiyfLLpxPnpFYY7ksfqUV

-- Dumped from database version 18.4
-- Dumped by pg_dump version 18.4

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: rb_group; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_group (
    uid bigint NOT NULL,
    lane integer NOT NULL,
    oldest_step bigint,
    pinned_staleness bigint,
    pinned_step bigint,
    mixed boolean NOT NULL,
    priority double precision NOT NULL,
    times_sampled integer NOT NULL,
    created_at double precision NOT NULL,
    reward double precision,
    bytes bigint NOT NULL,
    marks jsonb NOT NULL,
    tags jsonb,
    scoped_key character varying COLLATE pg_catalog."C",
    error text,
    uniform_key double precision,
    prioritized_key double precision,
    deliveries integer DEFAULT 0 NOT NULL,
    lease bigint,
    leased_until double precision,
    archived_at double precision,
    ticket bigint,
    made_from jsonb
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0.02');


--
-- Name: rb_lane; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_lane (
    id integer NOT NULL,
    buffer character varying NOT NULL COLLATE pg_catalog."C",
    task_name character varying NOT NULL COLLATE pg_catalog."C",
    status character varying NOT NULL COLLATE pg_catalog."C",
    leased boolean NOT NULL,
    step bigint,
    uniform_clock double precision,
    prioritized_clock double precision,
    idle_clock double precision
)
WITH (fillfactor='50');


--
-- Name: rb_payload; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_payload (
    uid bigint NOT NULL,
    outline jsonb NOT NULL,
    prompt text,
    data bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', toast.autovacuum_vacuum_scale_factor='0.02');
ALTER TABLE ONLY public.rb_payload ALTER COLUMN data SET STORAGE EXTERNAL;


--
-- Name: groups; Type: VIEW; Schema: public; Owner: -
--

CREATE VIEW public.groups AS
 SELECT g.uid,
    g.uid AS timestamp_id,
    l.buffer,
    l.task_name,
    l.status,
        CASE
            WHEN (g.pinned_staleness IS NOT NULL) THEN g.pinned_staleness
            ELSE ((l.step - g.oldest_step) - 1)
        END AS staleness,
    g.priority,
    g.times_sampled,
    to_timestamp(g.created_at) AS created_at,
    to_timestamp(g.leased_until) AS leased_until,
    to_timestamp(g.archived_at) AS archived_at,
    g.deliveries,
    g.reward,
    jsonb_array_length((g.marks -> 'oldest'::text)) AS rollouts,
    ( SELECT sum(((r.value ->> 'prompt_tokens'::text))::bigint) AS sum
           FROM jsonb_array_elements(p.outline) r(value)) AS prompt_tokens,
    ( SELECT COALESCE(sum(((r.value ->> 'response_tokens'::text))::bigint), (0)::numeric) AS "coalesce"
           FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
          WHERE (NOT COALESCE((((g.marks -> 'expired'::text) ->> ((r.place - 1))::integer))::boolean, false))) AS response_tokens,
    ( SELECT string_agg(((f.reason || ':'::text) || f.times), ' '::text ORDER BY f.reason) AS string_agg
           FROM ( SELECT (r.value ->> 'finish_reason'::text) AS reason,
                    count(*) AS times
                   FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
                  WHERE ((NOT COALESCE((((g.marks -> 'expired'::text) ->> ((r.place - 1))::integer))::boolean, false)) AND ((r.value ->> 'finish_reason'::text) IS NOT NULL))
                  GROUP BY (r.value ->> 'finish_reason'::text)) f) AS finish_reasons,
    p.prompt,
        CASE
            WHEN COALESCE((((g.marks -> 'expired'::text) ->> 0))::boolean, false) THEN ''::text
            ELSE ((p.outline -> 0) ->> 'response'::text)
        END AS response,
    g.tags,
    ((g.scoped_key)::jsonb ->> 1) AS key,
        CASE
            WHEN ((g.error IS NULL) AND ((l.status)::text = 'failed'::text)) THEN ( SELECT (r.value ->> 'error_msg'::text)
               FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
              WHERE ((r.value ->> 'error_msg'::text) IS NOT NULL)
              ORDER BY r.place
             LIMIT 1)
            ELSE g.error
        END AS error,
    g.bytes
   FROM ((public.rb_group g
     JOIN public.rb_lane l ON ((l.id = g.lane)))
     LEFT JOIN public.rb_payload p ON ((p.uid = g.uid)));


--
-- Name: rb_buffer; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_buffer (
    name character varying NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL,
    ticket_shift bigint NOT NULL,
    restored_step bigint,
    restored_at double precision
);


--
-- Name: rb_checkpoint; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_checkpoint (
    id integer NOT NULL,
    buffer character varying NOT NULL COLLATE pg_catalog."C",
    step bigint NOT NULL,
    created_at double precision NOT NULL,
    groups bigint NOT NULL,
    bytes bigint NOT NULL,
    next_ticket bigint NOT NULL,
    lanes jsonb NOT NULL,
    tallies jsonb NOT NULL
);


--
-- Name: rb_checkpoint_group; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_checkpoint_group (
    checkpoint integer NOT NULL,
    uid bigint NOT NULL,
    lane integer NOT NULL,
    oldest_step bigint,
    pinned_staleness bigint,
    pinned_step bigint,
    mixed boolean NOT NULL,
    priority double precision NOT NULL,
    times_sampled integer NOT NULL,
    created_at double precision NOT NULL,
    reward double precision,
    bytes bigint NOT NULL,
    marks jsonb NOT NULL,
    tags jsonb,
    scoped_key character varying COLLATE pg_catalog."C",
    error text,
    uniform_key double precision,
    prioritized_key double precision,
    deliveries integer NOT NULL,
    lease bigint,
    leased_until double precision,
    archived_at double precision,
    ticket bigint,
    made_from jsonb
)
WITH (autovacuum_vacuum_scale_factor='0.02');


--
-- Name: rb_checkpoint_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.rb_checkpoint_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: rb_checkpoint_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.rb_checkpoint_id_seq OWNED BY public.rb_checkpoint.id;


--
-- Name: rb_counter; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_counter (
    name character varying NOT NULL COLLATE pg_catalog."C",
    value bigint NOT NULL
);


--
-- Name: rb_cursor; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_cursor (
    buffer character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    checkpoint integer NOT NULL,
    version bigint NOT NULL,
    "position" bigint NOT NULL,
    value bytea NOT NULL
);


--
-- Name: rb_garbage; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_garbage (
    uid bigint NOT NULL,
    removed_at double precision NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02');


--
-- Name: rb_info; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_info (
    name character varying NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL
);


--
-- Name: rb_lane_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.rb_lane_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: rb_lane_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.rb_lane_id_seq OWNED BY public.rb_lane.id;


--
-- Name: rb_tally; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_tally (
    lane integer NOT NULL,
    name character varying NOT NULL COLLATE pg_catalog."C",
    shard integer NOT NULL,
    amount bigint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='1000');


--
-- Name: rb_uid; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.rb_uid
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: rb_version; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.rb_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: rollouts; Type: VIEW; Schema: public; Owner: -
--

CREATE VIEW public.rollouts AS
 SELECT uid,
    "position",
    buffer,
    task_name,
    (outline ->> 'id'::text) AS rollout_id,
        CASE
            WHEN expired THEN 'expired'::text
            ELSE (outline ->> 'status'::text)
        END AS status,
        CASE
            WHEN (step IS NOT NULL) THEN COALESCE(((step - oldest_step) - 1), (0)::bigint)
            ELSE COALESCE(staleness, ((outline ->> 'staleness'::text))::bigint)
        END AS staleness,
    oldest_step AS oldest_model_step,
    reward,
        CASE
            WHEN expired THEN NULL::jsonb
            ELSE (outline -> 'rewards'::text)
        END AS rewards,
    ((outline ->> 'prompt_tokens'::text))::bigint AS prompt_tokens,
        CASE
            WHEN expired THEN (0)::bigint
            ELSE ((outline ->> 'response_tokens'::text))::bigint
        END AS response_tokens,
        CASE
            WHEN expired THEN NULL::text
            ELSE (outline ->> 'finish_reason'::text)
        END AS finish_reason,
    prompt,
        CASE
            WHEN expired THEN ''::text
            ELSE (outline ->> 'response'::text)
        END AS response,
        CASE
            WHEN expired THEN NULL::text
            ELSE (outline ->> 'error_msg'::text)
        END AS error_msg
   FROM ( SELECT g.uid,
            ((o.place - 1))::integer AS "position",
            o.value AS outline,
            l.buffer,
            l.task_name,
            p.prompt,
                CASE
                    WHEN (g.pinned_staleness IS NULL) THEN l.step
                    ELSE g.pinned_step
                END AS step,
            (((g.marks -> 'oldest'::text) ->> ((o.place - 1))::integer))::bigint AS oldest_step,
            (((g.marks -> 'reward'::text) ->> ((o.place - 1))::integer))::double precision AS reward,
            (((g.marks -> 'staleness'::text) ->> ((o.place - 1))::integer))::bigint AS staleness,
            COALESCE((((g.marks -> 'expired'::text) ->> ((o.place - 1))::integer))::boolean, false) AS expired
           FROM (((public.rb_group g
             JOIN public.rb_lane l ON ((l.id = g.lane)))
             JOIN public.rb_payload p ON ((p.uid = g.uid)))
             CROSS JOIN LATERAL jsonb_array_elements(p.outline) WITH ORDINALITY o(value, place))) r;


--
-- Name: rb_checkpoint id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_checkpoint ALTER COLUMN id SET DEFAULT nextval('public.rb_checkpoint_id_seq'::regclass);


--
-- Name: rb_lane id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_lane ALTER COLUMN id SET DEFAULT nextval('public.rb_lane_id_seq'::regclass);


--
-- Data for Name: rb_buffer; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: rb_checkpoint; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_checkpoint VALUES (1, 'default', 8, 1795618584.9896924, 7, 2953, 8, '[{"id": 1, "step": 8, "buffer": "default", "leased": false, "status": "completed", "task_name": "math", "idle_clock": null, "uniform_clock": null, "prioritized_clock": null}, {"id": 2, "step": 8, "buffer": "default", "leased": false, "status": "completed", "task_name": "code", "idle_clock": null, "uniform_clock": null, "prioritized_clock": null}, {"id": 3, "step": null, "buffer": "default", "leased": false, "status": "filtered", "task_name": "math", "idle_clock": null, "uniform_clock": null, "prioritized_clock": null}, {"id": 4, "step": null, "buffer": "default", "leased": false, "status": "expired", "task_name": "math", "idle_clock": null, "uniform_clock": null, "prioritized_clock": null}]', '[{"lane": 1, "name": "expired", "amount": 1}, {"lane": 1, "name": "put", "amount": 3}, {"lane": 1, "name": "size", "amount": 2}, {"lane": 2, "name": "put", "amount": 3}, {"lane": 2, "name": "size", "amount": 3}, {"lane": 3, "name": "put", "amount": 1}, {"lane": 3, "name": "size", "amount": 1}, {"lane": 4, "name": "size", "amount": 1}]');


--
-- Data for Name: rb_checkpoint_group; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_checkpoint_group VALUES (1, 1, 4, NULL, 6, NULL, false, 1, 0, 1795618584.7191646, NULL, 428, '{"newest": [null, null], "oldest": [null, null], "reward": [null, null], "expired": [true, true], "staleness": [6, 6]}', '{"level": 1}', '["math", "prompt é1", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 2, 2, 2, NULL, NULL, false, 1, 0, 1795618584.826688, 0.5, 428, '{"newest": [2, 2], "oldest": [2, 2], "reward": [1.0, 0.0]}', '{"level": 2}', '["code", "prompt é2", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 3, 1, 3, NULL, NULL, false, 1, 0, 1795618584.8505907, 0.5, 428, '{"newest": [3, 3], "oldest": [3, 3], "reward": [1.0, 0.0]}', '{"level": 3}', '["math", "prompt é3", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 4, 2, 4, NULL, NULL, false, 1, 0, 1795618584.867955, 0.5, 429, '{"newest": [4, 4], "oldest": [4, 4], "reward": [1.0, 0.0]}', '{"level": 4}', '["code", "prompt é4", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 5, 1, 5, NULL, NULL, false, 1, 0, 1795618584.8793366, 0.5, 430, '{"newest": [5, 5], "oldest": [5, 5], "reward": [1.0, 0.0]}', '{"level": 5}', '["math", "prompt é5", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 6, 2, 6, NULL, NULL, false, 1, 0, 1795618584.8876815, 0.5, 430, '{"newest": [6, 6], "oldest": [6, 6], "reward": [1.0, 0.0]}', '{"level": 6}', '["code", "prompt é6", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_checkpoint_group VALUES (1, 7, 3, NULL, 0, NULL, false, 1, 0, 1795618584.9036512, 0.5, 380, '{"newest": [null, null], "oldest": [null, null], "reward": [1.0, 0.0]}', NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 1795618584.9036512, NULL, NULL);


--
-- Data for Name: rb_counter; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_counter VALUES ('uid', 0);
INSERT INTO public.rb_counter VALUES ('connection fff4e14c6fdd460886852f9db79ea718', 1795618585044726);
INSERT INTO public.rb_counter VALUES ('connection 56bc23c3752e49259c5e361e781093c9', 1795618585106124);
INSERT INTO public.rb_counter VALUES ('connection 0b9d3e6d43ff4eaaa5be7f149f3e5273', 1795618585131742);


--
-- Data for Name: rb_cursor; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: rb_garbage; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: rb_group; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_group VALUES (4, 2, 4, NULL, NULL, false, 1, 0, 1795618584.867955, 0.5, 429, '{"newest": [4, 4], "oldest": [4, 4], "reward": [1.0, 0.0]}', '{"level": 4}', '["code", "prompt é4", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_group VALUES (5, 1, 5, NULL, NULL, false, 1, 0, 1795618584.8793366, 0.5, 430, '{"newest": [5, 5], "oldest": [5, 5], "reward": [1.0, 0.0]}', '{"level": 5}', '["math", "prompt é5", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_group VALUES (6, 2, 6, NULL, NULL, false, 1, 0, 1795618584.8876815, 0.5, 430, '{"newest": [6, 6], "oldest": [6, 6], "reward": [1.0, 0.0]}', '{"level": 6}', '["code", "prompt é6", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_group VALUES (7, 3, NULL, 0, NULL, false, 1, 0, 1795618584.9036512, 0.5, 380, '{"newest": [null, null], "oldest": [null, null], "reward": [1.0, 0.0]}', NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 1795618584.9036512, NULL, NULL);
INSERT INTO public.rb_group VALUES (1, 4, NULL, 6, NULL, false, 1, 0, 1795618584.7191646, NULL, 428, '{"newest": [null, null], "oldest": [null, null], "reward": [null, null], "expired": [true, true], "staleness": [6, 6]}', '{"level": 1}', '["math", "prompt é1", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_group VALUES (3, 1, 3, NULL, NULL, false, 1, 1, 1795618584.8505907, 0.5, 428, '{"newest": [3, 3], "oldest": [3, 3], "reward": [1.0, 0.0]}', '{"level": 3}', '["math", "prompt é3", "default"]', NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_group VALUES (2, 5, 2, 5, 8, false, 1, 2, 1795618584.826688, 0.5, 428, '{"newest": [2, 2], "oldest": [2, 2], "reward": [1.0, 0.0]}', '{"level": 2}', '["code", "prompt é2", "default"]', NULL, NULL, NULL, 1, 8, 1795618645.140351, NULL, NULL, NULL);


--
-- Data for Name: rb_info; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: rb_lane; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_lane VALUES (3, 'default', 'math', 'filtered', false, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_lane VALUES (2, 'default', 'code', 'completed', false, 8, NULL, NULL, NULL);
INSERT INTO public.rb_lane VALUES (1, 'default', 'math', 'completed', false, 8, NULL, NULL, NULL);
INSERT INTO public.rb_lane VALUES (4, 'default', 'math', 'expired', false, NULL, NULL, NULL, NULL);
INSERT INTO public.rb_lane VALUES (5, 'default', 'code', 'completed', true, NULL, NULL, NULL, NULL);


--
-- Data for Name: rb_payload; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_payload VALUES (1, '[{"id": 1, "status": "completed", "response": "6", "staleness": 5, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 1, "status": "completed", "response": "7", "staleness": 5, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '1+5=', '\x52504c4201000000020000009401000000000000b859b5bbc200000000000000c2000000000000008aaa726f6c6c6f75745f696401a375696401a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4312b353da8726573706f6e7365a136ac726573706f6e73655f696473920105b4726573706f6e73655f6d6f64656c5f7374657073920101ad7365715f7374616c656e65737305a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696401a375696401a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4312b353da8726573706f6e7365a137ac726573706f6e73655f696473920106b4726573706f6e73655f6d6f64656c5f7374657073920101ad7365715f7374616c656e65737305a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (2, '[{"id": 2, "status": "completed", "response": "7", "staleness": 4, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 2, "status": "completed", "response": "8", "staleness": 4, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '2+5=', '\x52504c42010000000200000094010000000000002691e290c200000000000000c2000000000000008aaa726f6c6c6f75745f696402a375696402a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4322b353da8726573706f6e7365a137ac726573706f6e73655f696473920205b4726573706f6e73655f6d6f64656c5f7374657073920202ad7365715f7374616c656e65737304a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696402a375696402a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4322b353da8726573706f6e7365a138ac726573706f6e73655f696473920206b4726573706f6e73655f6d6f64656c5f7374657073920202ad7365715f7374616c656e65737304a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (3, '[{"id": 3, "status": "completed", "response": "8", "staleness": 3, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 3, "status": "completed", "response": "9", "staleness": 3, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '3+5=', '\x52504c420100000002000000940100000000000022d94572c200000000000000c2000000000000008aaa726f6c6c6f75745f696403a375696403a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4332b353da8726573706f6e7365a138ac726573706f6e73655f696473920305b4726573706f6e73655f6d6f64656c5f7374657073920303ad7365715f7374616c656e65737303a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696403a375696403a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4332b353da8726573706f6e7365a139ac726573706f6e73655f696473920306b4726573706f6e73655f6d6f64656c5f7374657073920303ad7365715f7374616c656e65737303a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (4, '[{"id": 4, "status": "completed", "response": "9", "staleness": 2, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 4, "status": "completed", "response": "10", "staleness": 2, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '4+5=', '\x52504c420100000002000000950100000000000058108c65c200000000000000c3000000000000008aaa726f6c6c6f75745f696404a375696404a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4342b353da8726573706f6e7365a139ac726573706f6e73655f696473920405b4726573706f6e73655f6d6f64656c5f7374657073920404ad7365715f7374616c656e65737302a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696404a375696404a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4342b353da8726573706f6e7365a23130ac726573706f6e73655f696473920406b4726573706f6e73655f6d6f64656c5f7374657073920404ad7365715f7374616c656e65737302a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (5, '[{"id": 5, "status": "completed", "response": "10", "staleness": 1, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 5, "status": "completed", "response": "11", "staleness": 1, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '5+5=', '\x52504c4201000000020000009601000000000000667cc969c300000000000000c3000000000000008aaa726f6c6c6f75745f696405a375696405a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4352b353da8726573706f6e7365a23130ac726573706f6e73655f696473920505b4726573706f6e73655f6d6f64656c5f7374657073920505ad7365715f7374616c656e65737301a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696405a375696405a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4352b353da8726573706f6e7365a23131ac726573706f6e73655f696473920506b4726573706f6e73655f6d6f64656c5f7374657073920505ad7365715f7374616c656e65737301a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (6, '[{"id": 6, "status": "completed", "response": "11", "staleness": 0, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 6, "status": "completed", "response": "12", "staleness": 0, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '6+5=', '\x52504c42010000000200000096010000000000005d348990c300000000000000c3000000000000008aaa726f6c6c6f75745f696406a375696406a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4362b353da8726573706f6e7365a23131ac726573706f6e73655f696473920605b4726573706f6e73655f6d6f64656c5f7374657073920606ad7365715f7374616c656e65737300a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c6473808aaa726f6c6c6f75745f696406a375696406a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4362b353da8726573706f6e7365a23132ac726573706f6e73655f696473920606b4726573706f6e73655f6d6f64656c5f7374657073920606ad7365715f7374616c656e65737300a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a9636f6d706c65746564ac65787472615f6669656c647380');
INSERT INTO public.rb_payload VALUES (7, '[{"id": 7, "status": "filtered", "response": "12", "staleness": 0, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}, {"id": 7, "status": "filtered", "response": "13", "staleness": 0, "finish_reason": null, "prompt_tokens": 0, "response_tokens": 2}]', '7+5=', '\x52504c4201000000020000006401000000000000b9b292d1aa00000000000000aa0000000000000089aa726f6c6c6f75745f696407a375696407a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4372b353da8726573706f6e7365a23132ac726573706f6e73655f696473920705ad7365715f7374616c656e65737300a6726577617264cb3ff0000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a866696c7465726564ac65787472615f6669656c64738089aa726f6c6c6f75745f696407a375696407a76d6573736167659182a4726f6c65a475736572a7636f6e74656e74a4372b353da8726573706f6e7365a23133ac726573706f6e73655f696473920706ad7365715f7374616c656e65737300a6726577617264cb0000000000000000a673746174757381c7001492b87265706c61796275662e726f6c6c6f75742e537461747573a866696c7465726564ac65787472615f6669656c647380');


--
-- Data for Name: rb_tally; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_tally VALUES (1, 'put', 20938, 2);
INSERT INTO public.rb_tally VALUES (2, 'put', 20929, 2);
INSERT INTO public.rb_tally VALUES (1, 'put', 20929, 1);
INSERT INTO public.rb_tally VALUES (1, 'size', 20929, 1);
INSERT INTO public.rb_tally VALUES (2, 'put', 20938, 1);
INSERT INTO public.rb_tally VALUES (2, 'size', 20938, 1);
INSERT INTO public.rb_tally VALUES (3, 'put', 20929, 1);
INSERT INTO public.rb_tally VALUES (3, 'size', 20929, 1);
INSERT INTO public.rb_tally VALUES (1, 'expired', 20938, 1);
INSERT INTO public.rb_tally VALUES (1, 'size', 20938, 1);
INSERT INTO public.rb_tally VALUES (4, 'size', 20938, 1);
INSERT INTO public.rb_tally VALUES (1, 'sampled_new', 20949, 1);
INSERT INTO public.rb_tally VALUES (2, 'sampled_new', 20938, 1);
INSERT INTO public.rb_tally VALUES (2, 'sampled_again', 20929, 1);
INSERT INTO public.rb_tally VALUES (2, 'size', 20929, 1);
INSERT INTO public.rb_tally VALUES (2, 'leased', 20929, 1);


--
-- Data for Name: rb_version; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.rb_version VALUES ('0005');


--
-- Name: rb_checkpoint_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.rb_checkpoint_id_seq', 1, true);


--
-- Name: rb_lane_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.rb_lane_id_seq', 5, true);


--
-- Name: rb_uid; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.rb_uid', 8, true);


--
-- Name: rb_buffer rb_buffer_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_buffer
    ADD CONSTRAINT rb_buffer_pkey PRIMARY KEY (name);


--
-- Name: rb_checkpoint_group rb_checkpoint_group_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_checkpoint_group
    ADD CONSTRAINT rb_checkpoint_group_pkey PRIMARY KEY (checkpoint, uid);


--
-- Name: rb_checkpoint rb_checkpoint_of_step; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_checkpoint
    ADD CONSTRAINT rb_checkpoint_of_step UNIQUE (buffer, step);


--
-- Name: rb_checkpoint rb_checkpoint_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_checkpoint
    ADD CONSTRAINT rb_checkpoint_pkey PRIMARY KEY (id);


--
-- Name: rb_counter rb_counter_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_counter
    ADD CONSTRAINT rb_counter_pkey PRIMARY KEY (name);


--
-- Name: rb_cursor rb_cursor_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_cursor
    ADD CONSTRAINT rb_cursor_pkey PRIMARY KEY (buffer, name, checkpoint);


--
-- Name: rb_garbage rb_garbage_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_garbage
    ADD CONSTRAINT rb_garbage_pkey PRIMARY KEY (uid);


--
-- Name: rb_group rb_group_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_group
    ADD CONSTRAINT rb_group_pkey PRIMARY KEY (uid);


--
-- Name: rb_info rb_info_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_info
    ADD CONSTRAINT rb_info_pkey PRIMARY KEY (name);


--
-- Name: rb_lane rb_lane_of_task; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_lane
    ADD CONSTRAINT rb_lane_of_task UNIQUE (buffer, task_name, status, leased);


--
-- Name: rb_lane rb_lane_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_lane
    ADD CONSTRAINT rb_lane_pkey PRIMARY KEY (id);


--
-- Name: rb_payload rb_payload_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_payload
    ADD CONSTRAINT rb_payload_pkey PRIMARY KEY (uid);


--
-- Name: rb_tally rb_tally_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_tally
    ADD CONSTRAINT rb_tally_pkey PRIMARY KEY (lane, name, shard);


--
-- Name: rb_version rb_version_pkc; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.rb_version
    ADD CONSTRAINT rb_version_pkc PRIMARY KEY (version_num);


--
-- Name: rb_garbage_in_order; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_garbage_in_order ON public.rb_garbage USING btree (removed_at);


--
-- Name: rb_group_archived; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_archived ON public.rb_group USING btree (lane, archived_at, uid) WHERE (archived_at IS NOT NULL);


--
-- Name: rb_group_by_pinned; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_by_pinned ON public.rb_group USING btree (lane, pinned_staleness DESC, uid) WHERE (pinned_staleness IS NOT NULL);


--
-- Name: rb_group_by_prioritized_key; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_by_prioritized_key ON public.rb_group USING btree (lane, prioritized_key, uid, priority) WHERE (prioritized_key IS NOT NULL);


--
-- Name: rb_group_by_step; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_by_step ON public.rb_group USING btree (lane, oldest_step, uid) WHERE (pinned_staleness IS NULL);


--
-- Name: rb_group_by_uniform_key; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_by_uniform_key ON public.rb_group USING btree (lane, uniform_key, uid) WHERE (uniform_key IS NOT NULL);


--
-- Name: rb_group_in_order; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_in_order ON public.rb_group USING btree (lane, uid);


--
-- Name: rb_group_key; Type: INDEX; Schema: public; Owner: -
--

CREATE UNIQUE INDEX rb_group_key ON public.rb_group USING btree (scoped_key) WHERE (scoped_key IS NOT NULL);


--
-- Name: rb_group_leased; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_leased ON public.rb_group USING btree (leased_until) WHERE (leased_until IS NOT NULL);


--
-- Name: rb_group_unsettled; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX rb_group_unsettled ON public.rb_group USING btree (lane) WHERE ((pinned_staleness IS NOT NULL) AND ((oldest_step IS NOT NULL) OR (pinned_step IS NULL)));


--
-- PostgreSQL database dump complete
--

\unrestrict blBlhDo5bo2RciITUxVCqDIiGhiaE2uAkqkls9faKcMiyfLLpxPnpFYY7ksfqUV

