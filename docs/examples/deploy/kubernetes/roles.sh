#!/bin/sh
# The roles of a run, made when the database is, with no more rights than they need (docs/operating.md): owner
# makes the tables, and brings them up to date; trainer reads and writes them; viewer reads them.
set -eu
psql --set ON_ERROR_STOP=1 --set owner="$OWNER_PASSWORD" --set trainer="$TRAINER_PASSWORD" \
    --set viewer="$VIEWER_PASSWORD" --username "$POSTGRES_USER" --dbname postgres <<'SQL'
CREATE ROLE owner LOGIN PASSWORD :'owner';
CREATE ROLE trainer LOGIN PASSWORD :'trainer';
CREATE ROLE viewer LOGIN PASSWORD :'viewer';
ALTER ROLE trainer SET lock_timeout = '30s';
ALTER ROLE trainer SET idle_in_transaction_session_timeout = '5min';
ALTER ROLE trainer SET synchronous_commit = on;
CREATE DATABASE rl OWNER owner TEMPLATE template0 ENCODING 'UTF8';
\connect rl
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE, CREATE ON SCHEMA public TO owner;
GRANT USAGE ON SCHEMA public TO trainer, viewer;
ALTER DEFAULT PRIVILEGES FOR ROLE owner IN SCHEMA public GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO trainer;
ALTER DEFAULT PRIVILEGES FOR ROLE owner IN SCHEMA public GRANT USAGE, SELECT, UPDATE ON SEQUENCES TO trainer;
ALTER DEFAULT PRIVILEGES FOR ROLE owner IN SCHEMA public GRANT SELECT ON TABLES TO viewer;
SQL
