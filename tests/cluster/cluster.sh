#!/usr/bin/env bash
# cluster.sh start | stop | boot NODE | power-off NODE: a SLURM cluster of this one machine, whose files are in $CLUSTER.
#
# A node is a set of Linux namespaces around a slurmd, with a network, a name and processes of its own. It can lose its power: all
# its processes die at once. Nodes share the file system and the processors.
set -euo pipefail
subnet=10.217.61
bridge=idbr0
nodes="node1 node2 node3"
export SLURM_CONF=$CLUSTER/slurm.conf

write_files() {
  chmod 755 "$CLUSTER"
  head -c 128 /dev/urandom >"$CLUSTER/munge.key"
  chmod 600 "$CLUSTER/munge.key"
  echo "127.0.0.1 localhost" >"$CLUSTER/hosts"
  cat >"$SLURM_CONF" <<END
ClusterName=interdomain
SlurmctldHost=$(uname -n)($subnet.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$CLUSTER/munge.socket
StateSaveLocation=$CLUSTER
SlurmdSpoolDir=$CLUSTER/spool-%n
SlurmctldPidFile=$CLUSTER/slurmctld.pid
SlurmdPidFile=$CLUSTER/slurmd-%n.pid
SlurmdLogFile=$CLUSTER/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=20
ReturnToService=2
PartitionName=all Nodes=${nodes// /,} Default=YES MaxTime=INFINITE State=UP
END
  for node in $nodes; do
    mkdir "$CLUSTER/spool-$node"
    echo "$subnet.${node#node} $node" >>"$CLUSTER/hosts"
    echo "NodeName=$node NodeAddr=$subnet.${node#node} CPUs=2" >>"$SLURM_CONF"
  done
}

wire() {
  ip netns add "id$1"
  ip link add "idv$1" type veth peer name eth0 netns "id$1"
  ip link set "idv$1" master $bridge up
  ip -n "id$1" addr add "$subnet.${1#node}/24" dev eth0
  ip -n "id$1" link set eth0 up
  ip -n "id$1" link set lo up
}

boot() {
  setsid nsenter --net="/run/netns/id$1" \
    unshare --uts --pid --mount --fork --mount-proc --kill-child \
    bash -c "hostname $1 && mount --bind $CLUSTER/hosts /etc/hosts && exec slurmd -D -N $1" >/dev/null 2>&1 &
  echo $! >"$CLUSTER/$1.pid"
}

# By unshare's --kill-child the first process of the node dies, and with it all others.
power_off() {
  kill -KILL "$(cat "$CLUSTER/$1.pid")"
  rm "$CLUSTER/$1.pid"
}

start() {
  stop # the networks of a cluster that was killed
  write_files
  ip link add $bridge type bridge
  ip addr add $subnet.254/24 dev $bridge
  ip link set $bridge up
  munged --force --socket="$CLUSTER/munge.socket" --key-file="$CLUSTER/munge.key" --pid-file="$CLUSTER/munge.pid" \
    --log-file="$CLUSTER/munge.log" --seed-file="$CLUSTER/munge.seed"
  slurmctld -c
  for node in $nodes; do
    wire "$node"
    boot "$node"
  done
}

stop() {
  for file in "$CLUSTER"/*.pid; do
    kill -KILL "$(cat "$file")" || true
  done
  ip link delete $bridge || true
  for node in $nodes; do
    ip netns delete "id$node" || true
    ip link delete "idv$node" || true
  done
} 2>/dev/null

case $1 in
  start) start ;;
  stop) stop ;;
  boot) boot "$2" ;;
  power-off) power_off "$2" ;;
esac
