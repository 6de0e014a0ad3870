#!/bin/sh
# The roles of a run, made when the database is: trainer writes, viewer reads what trainer makes.
set -eu
psql --set ON_ERROR_STOP=1 --set trainer="$TRAINER_PASSWORD" --set viewer="$VIEWER_PASSWORD" --username "$POSTGRES_USER" --dbname postgres <<'SQL'
CREATE ROLE trainer LOGIN PASSWORD :'trainer';
CREATE ROLE viewer LOGIN PASSWORD :'viewer';
ALTER ROLE trainer SET lock_timeout = '30s';
ALTER ROLE trainer SET idle_in_transaction_session_timeout = '5min';
ALTER ROLE trainer SET synchronous_commit = on;
CREATE DATABASE rl OWNER trainer TEMPLATE template0 ENCODING 'UTF8';
\connect rl
GRANT USAGE, CREATE ON SCHEMA public TO trainer;
GRANT USAGE ON SCHEMA public TO viewer;
ALTER DEFAULT PRIVILEGES FOR ROLE trainer IN SCHEMA public GRANT SELECT ON TABLES TO viewer;
SQL
