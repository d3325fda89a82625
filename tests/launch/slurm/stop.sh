#!/usr/bin/env bash
# End what start.sh FOLDER has started, its jobs too, and nothing else.
set -uo pipefail
[ -d "${1:?folder}/pids" ] || exit 0
top=$(cd "$1" && pwd -P)

# A process counts only with the start time that was noted: numbers are used again.
is_ours() { [ "$(cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null)" = "$2" ] && ! grep -qs '^State:.Z' "/proc/$1/status"; }
# Job steps, which outlive their slurmd, and what they run: both name one of our slurm.conf in their environment.
strays() {
    local folder pid
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        grep -qsz "^SLURM_CONF=$top/.*/slurm.conf" "$folder/environ" || continue
        if grep -qsz '^SLURM_JOB_ID=' "$folder/environ" || grep -qs '^slurmstepd' "$folder/comm"; then echo "$pid"; fi
    done
}
end() {
    local pid began
    read -r pid began <"$top/pids/$1" || return
    is_ours "$pid" "$began" || return
    kill -"${2:-TERM}" "$pid"
    for _ in {1..50}; do is_ours "$pid" "$began" || return; sleep 0.1; done
    kill -KILL "$pid"
}
for conf in "$top"/*/slurm.conf; do SLURM_CONF=$conf timeout 3 scancel --user=root --signal=KILL --full >/dev/null 2>&1; done
slurm=()
for file in "$top"/pids/*; do
    case ${file##*/} in munge | db | slurmdbd) ;; *) end "${file##*/}" & slurm+=($!) ;; esac
done
[ ${#slurm[@]} = 0 ] || wait "${slurm[@]}"
for pid in $(strays); do kill -KILL "$pid" 2>/dev/null; done
for name in slurmdbd db munge; do [ ! -e "$top/pids/$name" ] || end "$name"; done
rm -r "$top/pids"
