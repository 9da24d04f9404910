//! Who is not of the workload is left alone, whatever the workload does with process ids.

use std::time::Duration;

use gms_tests::*;

/// The bystander takes a CPU all the time.
const LIMIT: Duration = Duration::from_secs(240);

/// Everything runs in a PID namespace of its own: what gms might take for its workload there is nobody else's.
fn in_a_namespace(stage: &Stage, script: &str) -> Outcome {
    let verify = c_program("verify");
    let script = format!(
        "set -e\nrm -f {dir}/hold {dir}/bystander\nmkfifo {dir}/hold\n{verify} 48 forever <{dir}/hold >{dir}/bystander 2>&1 & by=$!\nexec 9>{dir}/hold\n\
         until grep -q 'round 1' {dir}/bystander; do sleep 0.1; done\n{script}\nkill -0 $by && echo bystander lives\n",
        dir = stage.dir().display(),
        verify = verify.display(),
    );
    let unshare = [
        tool("unshare").into_os_string(),
        "-pf".into(),
        "--kill-child".into(),
        "--mount-proc".into(),
    ];
    let shell = [tool("bash").into_os_string(), "-c".into(), script.into()];
    Program::new(unshare.into_iter().chain(shell)).limit(LIMIT).finish().expect_code(0)
}

/// The sandbox's own first process has the id 1 in its faults, as the machine's first process has.
#[test]
fn a_workload_with_a_pid_namespace_is_paged_and_nobody_else() {
    let Some(stage) = Stage::set() else { return };
    let script = format!(
        "{gms} run --local 24M --export 512M --stats {dir}/stats.json -- unshare -pf --kill-child --mount-proc {verify} 96 3 9>&- & g=$!\n\
         seen=0; while kill -0 $g 2>/dev/null; do if grep -q '^VmFlags:.* um' /proc/$by/smaps; then seen=1; fi; sleep 0.1; done\n\
         wait $g; echo registered $seen",
        gms = gms_binary().display(),
        dir = stage.dir().display(),
        verify = c_program("verify").display(),
    );
    let native = Program::new([c_program("verify")]).args(["96", "3"]).finish().expect_code(0);
    let run = || {
        let mut outcome = in_a_namespace(&stage, &script);
        let text = outcome.text();
        assert!(text.contains("registered 0") && text.contains("bystander lives"), "{text}");
        assert!(text.contains(native.text().trim()), "{text}");
        outcome.stats = Some(Stats::read(&stage.path("stats.json")).expect("statistics"));
        outcome
    };
    enough_in_time(|stats| stats.pages_out > 8192 && stats.processes == 2, run);
}

/// People end gms with pkill: it takes the pager and the process before the shell, not those who see to it that no zeros are read. A third of the pages is
/// away by then: the program has had all of them. Whoever sees it first ends the program: its parent, for the end of the front, or an evictor, for the pager's.
#[test]
fn killing_everything_by_the_name_of_gms_spoils_no_page() {
    let Some(stage) = Stage::set() else { return };
    let script = format!(
        "{}pkill -9 gms\nif wait $g; then exit 1; fi\n\
         while kill -0 $w 2>/dev/null; do sleep 0.1; done\n\
         while pgrep -x far-evictor >/dev/null || pgrep -x far-keeper >/dev/null; do sleep 0.1; done\n\
         if grep -E 'ZERO PAGE|MISMATCH' {}/err; then exit 1; fi",
        under_way(&stage),
        stage.dir().display(),
    );
    let text = in_a_namespace(&stage, &script).text();
    assert!(text.contains("bystander lives"), "{text}");
}

/// Starts `verify`, which is process `w` then, under a gms whose front is `g`, and waits until a third of its pages is away.
fn under_way(stage: &Stage) -> String {
    format!(
        "rm -f {dir}/in; mkfifo {dir}/in\n\
         {gms} run --local 24M --export 512M -- {verify} 96 forever <{dir}/in >{dir}/out 2>{dir}/err 9>&- & g=$!\n\
         exec 8>{dir}/in\nuntil grep -q 'round 2' {dir}/out; do sleep 0.1; done\n\
         w=$(pgrep -n verify)\nuntil [ $(grep RssAnon /proc/$w/status | tr -dc 0-9) -lt 65536 ]; do sleep 0.1; done\n",
        gms = gms_binary().display(),
        dir = stage.dir().display(),
        verify = c_program("verify").display(),
    )
}

/// Starts `sleep`, which is process `w` then, in the same way. Nothing of it is paged: it has no evictor to end it.
fn sleeper(stage: &Stage) -> String {
    format!(
        "{gms} run --local 24M --export 512M -- sleep 1000 2>{dir}/err 8>&- 9>&- & g=$!\n\
         until w=$(pgrep -n -f '^sleep 1000$') && {gms} status $w >/dev/null 2>&1; do sleep 0.1; done\n",
        gms = gms_binary().display(),
        dir = stage.dir().display(),
    )
}

/// The reaper is `r` and the pager `p`, when the others of gms have taken their names and what another pager needs is written down.
const WHO: &str = "until [ $(pgrep -P $g -x gms | wc -l) = 2 ]; do sleep 0.1; done\n\
    r=$(awk '/^PPid/ {print $2}' /proc/$w/status); p=$(pgrep -P $g -x gms | grep -vx $r)\n\
    until ls -l /proc/$p/fd | grep -q memfd:gms-handed; do sleep 0.1; done\n";

/// Another pager goes on, or is about to, and finds nobody who could tell how the command fares.
#[test]
fn a_pager_that_is_left_alone_ends_its_workload() {
    let Some(stage) = Stage::set() else { return };
    let alone = |workload: &str, moments: &str| {
        format!(
            "for moment in {moments}; do {workload}{WHO}\
             kill -9 $p; sleep $moment; kill -9 $r $g\nif wait $g; then exit 1; fi\n\
             for look in $(seq 50); do if ! kill -0 $w 2>/dev/null; then break; fi; sleep 0.1; done\n\
             if kill -0 $w 2>/dev/null; then echo it runs on; exit 1; fi\n\
             while pgrep -x 'far-.*|gms' >/dev/null; do sleep 0.1; done\n\
             if grep -E 'ZERO PAGE|MISMATCH' {dir}/err; then exit 1; fi\n\
             done\n",
            dir = stage.dir().display(),
        )
    };
    let script = alone(&under_way(&stage), ".002 .01 .02 .05")
        + &alone(&sleeper(&stage), ".005 .01 .015 .02");
    let text = in_a_namespace(&stage, &script).text();
    assert!(text.contains("bystander lives"), "{text}");
}

/// As in two containers of a pod: the front of the one has the id that the pager of the other has.
#[test]
fn a_process_of_the_same_id_in_another_pid_namespace_is_not_taken_for_a_pager_above() {
    let Some(stage) = Stage::set() else { return };
    let (gms, beside) = (gms_binary(), stage.path("beside"));
    let script = format!(
        "echo $(($1 - 1)) >/proc/sys/kernel/ns_last_pid\n\
         {} run --local 24M --export 64M -- sh -c 'sed -n \"s/^PPid:[^0-9]*/front /p\" /proc/$PPID/status'\n\
         echo status $?\n",
        gms.display(),
    );
    std::fs::write(&beside, script).expect("a script");
    let script = format!(
        "{}{WHO}unshare -pf --kill-child --mount-proc sh {} $p\necho pager $p\nkill $g\nwait $g || true",
        sleeper(&stage),
        beside.display(),
    );
    let text = in_a_namespace(&stage, &script).text();
    let number = |of: &str| text.lines().find_map(|line| line.strip_prefix(of)).map(String::from);
    assert!(number("pager ").is_some_and(|pager| number("front ") == Some(pager)), "{text}");
    assert!(text.contains("status 0"), "{text}");
}

/// Both have their control sockets in the same directory.
#[test]
fn pagers_of_the_same_id_in_two_pid_namespaces_are_both_found() {
    let Some(stage) = Stage::set() else { return };
    let twin = stage.path("twin");
    let script = format!(
        // Until all have been started nothing is executed here: it would have one of the ids.
        "cd {}\necho 200 >/proc/sys/kernel/ns_last_pid\n{gms} run --local 24M --export 64M -- sleep 1000 & g=$!\n\
         name=; until [ \"$name\" = sleep ]; do for of in /proc/[0-9]*/comm; do read -r name <$of; [ \"$name\" != sleep ] || break; done; done 2>/dev/null\n\
         until w=$(pgrep -n -f '^sleep 1000$') && {gms} status $w >/dev/null 2>&1; do sleep 0.1; done\n\
         {WHO}echo $p >pager.$1; mv pager.$1 pager-$1\nuntil [ -e go-$1 ]; do sleep 0.1; done\n\
         {gms} status $w >/dev/null && echo $1 is found\nkill $w; wait $g",
        stage.dir().display(),
        gms = gms_binary().display(),
    );
    std::fs::write(&twin, script).expect("a script");
    let script = format!(
        "cd {}; for twin in a b; do unshare -pf --kill-child --mount-proc bash {} $twin 8>&- 9>&- & twins=\"$twins $!\"\n\
         until [ -e pager-$twin ]; do sleep 0.1; done; done\ncmp pager-a pager-b\n\
         set $twins; touch go-a; wait $1 || true; touch go-b; wait $2 || true",
        stage.dir().display(),
        twin.display(),
    );
    let text = in_a_namespace(&stage, &script).text();
    assert!(text.contains("a is found") && text.contains("b is found"), "{text}");
}

/// Whatever it said of a process would be said of another.
#[test]
fn without_a_proc_of_its_pid_namespace_nothing_is_started() {
    let Some(stage) = Stage::set() else { return };
    let (gms, started) = (gms_binary(), stage.path("started"));
    let script = format!(
        "unshare -pf --kill-child {} run --local 24M --export 64M -- touch {} 9>&- 2>&1 || echo status $?",
        gms.display(),
        started.display(),
    );
    let text = in_a_namespace(&stage, &script).text();
    assert!(text.contains("/proc is of another PID namespace"), "{text}");
    assert!(text.contains("status 125") && !started.exists(), "{text}");
}

/// It sees the workload's process as its own child then, and gms's processes have none left.
#[test]
fn a_daemon_in_another_pid_namespace_is_paged_until_it_ends() {
    let Some(stage) = Stage::set() else { return };
    let script = format!(
        "unshare -pf --kill-child sleep 1000 & u=$!\nuntil x=$(pgrep -P $u); do sleep 0.1; done\nmkfifo {dir}/in\nexec 8<>{dir}/in\n\
         {gms} run --local 24M --export 512M -- nsenter -t $x -p sh -c \
         '{verify} 96 forever <{dir}/in >{dir}/out 2>&1 & until grep -q \"round 0\" {dir}/out; do sleep 0.1; done' 8>&- 9>&- & g=$!\n\
         until grep -q 'round 2' {dir}/out; do sleep 0.1; done\nkill -0 $g && echo gms lives\n\
         exec 8>&-; wait $g; echo status $?\n\
         if grep -E 'ZERO PAGE|MISMATCH' {dir}/out; then exit 1; fi\nkill $u",
        gms = gms_binary().display(),
        dir = stage.dir().display(),
        verify = c_program("verify").display(),
    );
    let text = in_a_namespace(&stage, &script).text();
    assert!(text.contains("gms lives") && text.contains("status 0"), "{text}");
}
