#!/usr/bin/env bash
# A SLURM cluster inside this machine: a login node ("hub", with slurmctld) and N nodes (slurmd, sshd), each with a host
# name, a network interface, processes and /dev/shm of its own. Needs root. machines.py starts it as the first process
# of new namespaces:
#
#   unshare --mount --pid --fork --kill-child --mount-proc --uts --net  tests/cluster/cluster.sh run FOLDER NODES
#
# All of it lives in these namespaces. When this process ends, also by a kill, the kernel ends every process in them
# and drops their mounts and networks: nothing is left behind, and several clusters can run side by side. The machine's
# /etc, /run and network are never written: the cluster sees mounts of its own on top of them.
#
#   cluster.sh run FOLDER NODES     start; print "up"; stay until stdin is closed
#   cluster.sh boot FOLDER NODE     start a node again after its first process was killed (inside the cluster)
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin
verb="$1" folder="$2"
network=10.77.0
cpus=8 gpus=8 # what nodes claim to have; the GPUs are copies of /dev/null

# What is between the two quotes runs as the first process of a node. It is its power switch: killed, the node is dead.
# shellcheck disable=SC2016
node_story='
    hostname "$1"
    mount -t tmpfs -o size=2g none /dev/shm
    ip link set lo up
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
    ip addr add "$2" dev eth0
    ip link set eth0 up
    /usr/sbin/sshd -f /dev/null -h /run/ssh/host_key -o PidFile=none -o AuthorizedKeysFile=/run/ssh/user_key.pub \
        -o PasswordAuthentication=no -o UsePAM=no -o StrictModes=no -o PermitRootLogin=prohibit-password \
        -o AcceptEnv="*" -E "$3/sshd.$1.log"
    slurmd
    while :; do sleep 3600 & wait; done
'

address_of() { printf '%s.%d' "$network" "$((10 + ${1#node}))"; }

boot() { # NODE: its switch, then the cable from the hub to it
    env -i PATH="$PATH" LANG=C.UTF-8 unshare --mount --pid --fork --kill-child --mount-proc --uts --net \
        bash -c "$node_story" first "$1" "$(address_of "$1")/24" "$folder" >>"$folder/$1.log" 2>&1 </dev/null &
    local outer=$! inner="" own
    own="$(readlink /proc/self/ns/net)"
    # The first process of the node is there once the child of unshare has left our network.
    until [ -n "$inner" ] && [ "$(readlink "/proc/$inner/ns/net" || echo "$own")" != "$own" ]; do
        kill -0 "$outer"
        sleep 0.02
        inner="$(cat "/proc/$outer/task/$outer/children")"
        inner="${inner%% *}"
    done
    printf '%s\n' "$inner" >"/run/node/$1"
    ip link del "v$1" 2>/dev/null || true
    # After a crash the others still know its address by the same hardware.
    ip link add "v$1" type veth peer name eth0 address "$(printf '02:00:00:00:00:%02x' "${1#node}")" netns "$inner"
    ip link set "v$1" master br0 up
}

own_etc() {
    mkdir -p /run/netns /run/sshd /run/ssh /run/munge /run/slurm /run/dev /run/node /run/etc/slurm
    {
        printf '127.0.0.1 localhost\n%s.1 hub\n' "$network"
        for name in "${nodes[@]}"; do printf '%s %s\n' "$(address_of "$name")" "$name"; done
    } >/run/etc/hosts
    mount --bind /run/etc/hosts /etc/hosts
    : >/run/etc/resolv.conf
    [ ! -e /etc/resolv.conf ] || mount --bind /run/etc/resolv.conf "$(realpath /etc/resolv.conf)"
    # Keys that live as long as the cluster.
    ssh-keygen -q -t ed25519 -N '' -f /run/ssh/user_key
    ssh-keygen -q -t ed25519 -N '' -f /run/ssh/host_key
    printf '%s\n' 'Host *' ' IdentityFile /run/ssh/user_key' ' StrictHostKeyChecking no' \
        ' UserKnownHostsFile /dev/null' ' LogLevel ERROR' >/run/etc/ssh_config
    mount --bind /run/etc/ssh_config /etc/ssh/ssh_config
    mkdir -p /etc/slurm
    mount --bind /run/etc/slurm /etc/slurm
}

slurm_conf() {
    local index
    for index in $(seq 0 $((gpus - 1))); do mknod "/run/dev/gpu$index" c 1 3; done
    # File= is needed: with Count= alone slurmd reports no GPUs.
    printf 'AutoDetect=off\nName=gpu File=/run/dev/gpu[0-%d]\n' $((gpus - 1)) >/etc/slurm/gres.conf
    # Only to skip autodetection, which is fatal where /sys/fs/cgroup is not mounted.
    printf 'CgroupPlugin=cgroup/v1\n' >/etc/slurm/cgroup.conf
    # cred_expire: a requeued job waits that long and a second more; starts that take longer on a busy machine fail.
    # SlurmdTimeout: when a dead node is given up, on real clusters after minutes.
    cat >/etc/slurm/slurm.conf <<CONF
ClusterName=toy
SlurmctldHost=hub
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1,requeue_setup_env_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=9
KillWait=10
UnkillableStepTimeout=60
MinJobAge=3600
LaunchParameters=send_gids
RebootProgram=/bin/true
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.%n.pid
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurm/spool.%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
NodeName=node[1-${#nodes[@]}] CPUs=$cpus RealMemory=500000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 MaxTime=INFINITE GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=20 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
}

run() { # NODES
    mapfile -t nodes < <(seq -f 'node%.0f' "$1")
    mount -t tmpfs -o mode=755 none /run
    hostname hub
    own_etc
    slurm_conf
    ip link set lo up
    ip link add br0 type bridge
    ip addr add "$network.1/24" dev br0
    ip link set br0 up
    (umask 077 && head -c 1024 /dev/urandom >/run/munge/key)
    # A Unix socket: one munged serves all nodes.
    munged --force --key-file=/run/munge/key --pid-file=/run/munge/pid --log-file="$folder/munged.log" \
        --seed-file=/run/munge/seed --socket=/run/munge/munge.socket.2
    env -i PATH="$PATH" slurmctld
    for name in "${nodes[@]}"; do boot "$name"; done
    for _ in $(seq 150); do
        if [ "$(sinfo -h -N -p main -o %t 2>/dev/null | grep -c '^idle$')" = "${#nodes[@]}" ]; then
            echo up
            cat >/dev/null # until whoever started us closes our stdin, or dies
            exit 0
        fi
        sleep 0.2
    done
    echo "the nodes did not come up:" >&2
    sinfo -R >&2
    exit 1
}

case "$verb" in
    run) run "$3" ;;
    boot) boot "$3" ;;
    *) exit 2 ;;
esac
