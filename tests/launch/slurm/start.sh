#!/usr/bin/env bash
# A real SLURM for the tests: clusters alpha and beta of two nodes each with one accounting service, all on this host
# and all below one folder. Needs root and the Debian packages slurm-wlm slurmdbd munge mariadb-server.
#
#   start.sh FOLDER      then SLURM_CONF=FOLDER/alpha/slurm.conf squeue; stop.sh FOLDER ends it
#
# CLUSTERS, NODES, CPUS, MEMORY (MiB), GPUS (pretended) of each node, MAX_ARRAY, NODE_TIMEOUT (s), REQUEUE_DELAY (s) and
# BASE_PORT may be set. OWNER=<pid>: everything is ended once that process is gone.
# FOLDER/daemons/<name> is each daemon's command, FOLDER/pids/<name> its process and when that began.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }
mkdir -p "$1"
top=$(cd "$1" && pwd -P)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
read -ra clusters <<<"${CLUSTERS:-alpha beta}"
nodes=${NODES:-2} cpus=${CPUS:-8} memory=${MEMORY:-8000} gpus=${GPUS:-2}

fail() { echo "start.sh: $*; see $top/log" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "root is needed"
for tool in munged slurmctld slurmd slurmdbd mariadbd mariadb-install-db; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
done
[ ! -e "$top/pids" ] || fail "$top is in use"
mkdir -p "$top"/{pids,daemons,log,run,db} && mkdir -m 711 "$top/munge"
chmod 755 "$top"
trap '[ $? = 0 ] || "$here/stop.sh" "$top" >&2' EXIT

# A block of ports on which nothing listens: the data base, its service, then a controller and its nodes each.
ports=$((2 + ${#clusters[@]} * (nodes + 1)))
taken() { local p; for ((p = $1; p < $1 + ports; p++)); do (: <>"/dev/tcp/127.0.0.1/$p") 2>/dev/null && return 0; done; return 1; }
base=${BASE_PORT:-0}
while [ "$base" = 0 ] || { [ -z "${BASE_PORT:-}" ] && taken "$base"; }; do base=$((10000 + (RANDOM % 300) * 30)); done

# daemon NAME COMMAND...: keep the command, for tests that end a daemon and start it again, and run it.
daemon() {
    printf '#!/bin/sh\nexec %s >>%q 2>&1 </dev/null\n' "${*:2}" "$top/log/$1.out" >"$top/daemons/$1"
    chmod +x "$top/daemons/$1"
    setsid "$top/daemons/$1" &
    echo "$! $(cut -d' ' -f22 "/proc/$!/stat")" >"$top/pids/$1"
}
# until_true WHAT COMMAND...: for 30 s.
until_true() {
    local end=$((SECONDS + 30))
    while ! "${@:2}" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "no $1 after 30 s"
        sleep 0.1
    done
}

# -- identity: a munge of our own ------------------------------------------------------------------------------------
socket=$top/munge/socket
head -c 256 /dev/urandom >"$top/munge/key" && chmod 400 "$top/munge/key"
daemon munge munged --foreground --force --socket="$socket" --key-file="$top/munge/key" --seed-file="$top/munge/seed" \
    --pid-file="$top/run/munge.pid" --log-file="$top/log/munge.log" --num-threads=2

# -- accounting ------------------------------------------------------------------------------------------------------
mariadb-install-db --no-defaults --user=root --datadir="$top/db" --skip-test-db --innodb-log-file-size=4M \
    --auth-root-authentication-method=socket >"$top/log/install.out" 2>&1
daemon db mariadbd --no-defaults --user=root --datadir="$top/db" --socket="$top/run/db" --pid-file="$top/run/db.pid" \
    --bind-address=127.0.0.1 --port="$base" --innodb-buffer-pool-size=32M --innodb-log-file-size=4M \
    --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF
sql() { mariadb --no-defaults --user=root --socket="$top/run/db" --execute="$1"; }
until_true "data base" sql "select 1"
secret=$(head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n')
sql "create database acct; create user slurm@'127.0.0.1' identified by '$secret'; grant all on acct.* to slurm@'127.0.0.1'"
until_true munge test -S "$socket"
install -m 600 /dev/null "$top/slurmdbd.conf"
cat >"$top/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((base + 1))
SlurmUser=root
LogFile=$top/log/slurmdbd.log
PidFile=$top/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$base
StorageUser=slurm
StoragePass=$secret
StorageLoc=acct
END
daemon slurmdbd env SLURM_CONF="$top/slurm.conf" slurmdbd -D # it looks for slurmdbd.conf beside that file

# -- the clusters ----------------------------------------------------------------------------------------------------
port=$((base + 2))
for name in "${clusters[@]}"; do
    mkdir -p "$top/$name"/{state,spool,gpu}
    for ((g = 0; g < gpus; g++)); do mknod "$top/$name/gpu/$g" c 1 3; done # /dev/null by another name
    [ "$gpus" = 0 ] || echo "Name=gpu File=$top/$name/gpu/[0-$((gpus - 1))]" >"$top/$name/gres.conf"
    cat >"$top/$name/slurm.conf" <<END
ClusterName=$name
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is how long a requeued job waits before it starts again
AuthInfo=socket=$socket,cred_expire=${REQUEUE_DELAY:-10}
CredType=cred/munge
StateSaveLocation=$top/$name/state
SlurmdSpoolDir=$top/$name/spool/%n
SlurmctldPidFile=$top/run/$name.pid
SlurmdPidFile=$top/run/%n.pid
SlurmctldLogFile=$top/log/$name.log
SlurmdLogFile=$top/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MaxArraySize=${MAX_ARRAY:-1001}
ReturnToService=2
SlurmdTimeout=${NODE_TIMEOUT:-15}
KillWait=5
DefMemPerCPU=64
GresTypes=gpu
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((base + 1))
AccountingStoragePass=$socket
AccountingStoreFlags=job_comment
AccountingStorageEnforce=limits,qos
END
    for ((n = 1; n <= nodes; n++)); do
        gres=""
        [ "$gpus" = 0 ] || gres="Gres=gpu:$gpus"
        echo "NodeName=$name-$n NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + n)) CPUs=$cpus" \
            "RealMemory=$memory $gres"
    done >>"$top/$name/slurm.conf"
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=1-0 PriorityTier=10 PreemptMode=OFF" >>"$top/$name/slurm.conf"
    port=$((port + nodes + 1))
done
cp "$top/${clusters[0]}/slurm.conf" "$top/slurm.conf"
export SLURM_CONF=$top/slurm.conf
until_true "accounting service" sacctmgr --noheader list cluster
for name in "${clusters[@]}"; do
    for what in "cluster $name" "account test cluster=$name" "user root account=test cluster=$name"; do
        # shellcheck disable=SC2086
        sacctmgr --immediate add $what >>"$top/log/sacctmgr.out" 2>&1
    done
    daemon "$name" env SLURM_CONF="$top/$name/slurm.conf" slurmctld -D -i
    for ((n = 1; n <= nodes; n++)); do
        daemon "$name-$n" env SLURM_CONF="$top/$name/slurm.conf" slurmd -D -N "$name-$n"
    done
done
all_idle() { [ "$(SLURM_CONF=$top/$1/slurm.conf timeout 5 sinfo -hNp main -t idle -o %N | wc -l)" = "$nodes" ]; }
registered() { [ "$(sacctmgr -nP list cluster format=controlport | grep -cv '^0$')" = ${#clusters[@]} ]; }
for name in "${clusters[@]}"; do until_true "nodes of $name" all_idle "$name"; done
until_true "registration of the clusters" registered # before it -M does not find them
if [ -n "${OWNER:-}" ]; then
    setsid bash -c 'while kill -0 "$1" 2>/dev/null && [ -e "$3/pids" ]; do sleep 2; done; exec "$2" "$3"' - \
        "$OWNER" "$here/stop.sh" "$top" >/dev/null 2>&1 </dev/null &
fi
