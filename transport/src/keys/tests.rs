//! Keys on disk, and what is refused of them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::ExtendedKeyUsagePurpose;

use super::authority::{CLOCK_SKEW, params, valid_for};
use super::revoked::LIST_MAX;
use super::*;

/// A directory of the test's own, removed with all that is in it.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("gms-keys-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn with_keys() -> Self {
        let dir = Self::new();
        init(&dir.0).unwrap();
        dir
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes what was issued into a directory of its own.
fn write(authority: &Authority, dir: &Path, role: Role, issued: &authority::Issued) {
    let mut files = Vec::from(issued.files(dir, role));
    files.push(files::File::public(dir.join(CA), authority.pem.as_str()));
    files::write_new(dir, &files).unwrap();
}

/// A directory `dir/before` with keys as they were before there were ids.
fn issue_before_ids(dir: &Path) -> PathBuf {
    let (authority, target) = (Authority::load(dir).unwrap(), dir.join("before"));
    write(&authority, &target, Role::Node, &authority.issue_before_ids(Role::Node));
    let client = authority.issue_before_ids(Role::Client);
    files::write_new(&target, &client.files(&target, Role::Client)).unwrap();
    target
}

fn set_list(dir: &Path, text: impl AsRef<[u8]>) {
    fs::write(dir.join(REVOKED), text).unwrap();
}

#[test]
fn what_init_makes_loads_and_private_keys_are_private() {
    let dir = Dir::with_keys();
    for role in [Role::Node, Role::Client] {
        assert_eq!(load(&dir.0, role).unwrap().role(), role);
    }
    for file in ["ca-key.pem", "node-key.pem", "client-key.pem"] {
        let mode = fs::metadata(dir.0.join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[test]
fn a_private_key_that_others_can_read_is_refused() {
    let dir = Dir::with_keys();
    let set = |file: &str, mode| {
        fs::set_permissions(dir.0.join(file), fs::Permissions::from_mode(mode)).unwrap();
    };
    // Of root's keys its group may read; the tests may run as root, or not.
    let of_root = fs::metadata(&dir.0).unwrap().uid() == 0;
    for (mode, good) in
        [(0o600, true), (0o400, true), (0o640, of_root), (0o644, false), (0o660, false)]
    {
        set("node-key.pem", mode);
        let loaded = load(&dir.0, Role::Node);
        assert_eq!(loaded.is_ok(), good, "{mode:o}: {loaded:?}");
        if let Err(error) = loaded {
            assert!(
                error.to_string().contains(&format!("(mode {mode:04o}): chmod 600")),
                "{error}"
            );
        }
    }
    set("ca-key.pem", 0o644);
    assert!(matches!(issue(&dir.0, Role::Node, "x"), Err(KeysError::Exposed { .. })));
    set("ca.pem", 0o666);
    set("client.pem", 0o666);
    load(&dir.0, Role::Client).unwrap();
}

#[test]
fn a_certificate_says_until_when_it_is_good() {
    let (node, _) = ephemeral().unwrap();
    let left = node.expires().duration_since(SystemTime::now()).unwrap();
    assert!(left <= LIFETIME && left > LIFETIME - Duration::from_secs(60), "{left:?}");
}

#[test]
fn a_node_beside_a_client_is_trusted_by_that_client_alone() {
    let (others, client) = ephemeral().unwrap();
    let (node, trusting) = beside(&client).unwrap();
    let now = UnixTime::now();
    let is_good =
        |by: &Identity, who: &Identity| check(&by.trust.roots, who.role, &who.cert, now).is_ok();
    assert!(is_good(&node, &client) && is_good(&trusting, &node) && is_good(&trusting, &others));
    assert!(!is_good(&client, &node) && !is_good(&others, &node));
}

#[test]
fn nothing_is_overwritten() {
    let dir = Dir::with_keys();
    let before = fs::read(dir.0.join("node-key.pem")).unwrap();
    fs::remove_file(dir.0.join(CA)).unwrap();
    assert!(matches!(init(&dir.0), Err(KeysError::Exists { .. })));
    assert_eq!(fs::read(dir.0.join("node-key.pem")).unwrap(), before);
    assert!(!dir.0.join(CA).exists(), "nothing was written beside it");
}

#[test]
fn issued_directories_load_elsewhere_and_cannot_issue() {
    let dir = Dir::with_keys();
    let target = issue(&dir.0, Role::Node, "rack-1.b").unwrap();
    load(&target, Role::Node).unwrap();
    let text = load(&target, Role::Client).unwrap_err().to_string();
    assert!(text.contains("key of a node") && text.contains("issue DIR client NAME"), "{text}");
    assert!(matches!(renew(&dir.0, Some("rack-1.c")), Err(KeysError::NoBearer { .. })));
    assert!(matches!(issue(&target, Role::Node, "x"), Err(KeysError::Missing { .. })));
    issue(&dir.0, Role::Client, "rack-1.b").unwrap();
    load(&target, Role::Client).unwrap();
    let again = issue(&dir.0, Role::Node, "rack-1.b");
    assert!(matches!(again, Err(KeysError::Exists { .. })), "{again:?}");
    let (long, id) = ("x".repeat(65), "ab".repeat(16));
    for name in ["", ".", "..", ".x", "a/b", "a b", &long, &id, "revoked.txt", "ca.pem"] {
        assert!(matches!(issue(&dir.0, Role::Node, name), Err(KeysError::Name(_))), "{name}");
    }
}

#[test]
fn each_fault_is_named_with_its_file() {
    let (dir, other) = (Dir::with_keys(), Dir::with_keys());
    let copy = |file: &str| fs::copy(other.0.join(file), dir.0.join(file)).unwrap();
    let fault = |role| load(&dir.0, role).unwrap_err();

    copy("node-key.pem");
    assert!(matches!(fault(Role::Node), KeysError::Mismatch { .. }));
    copy("node.pem");
    assert!(matches!(fault(Role::Node), KeysError::WrongCa { .. }));
    fs::copy(dir.0.join("client.pem"), dir.0.join("node.pem")).unwrap();
    fs::copy(dir.0.join("client-key.pem"), dir.0.join("node-key.pem")).unwrap();
    assert!(matches!(fault(Role::Node), KeysError::WrongRole { .. }), "{}", fault(Role::Node));
    fs::write(dir.0.join("client.pem"), "no certificate").unwrap();
    let text = fault(Role::Client).to_string();
    assert!(text.contains("client.pem holds no valid PEM certificate"), "{text}");
    fs::remove_file(dir.0.join("client-key.pem")).unwrap();
    fs::remove_file(dir.0.join("client.pem")).unwrap();
    fs::remove_file(dir.0.join("node.pem")).unwrap();
    let text = fault(Role::Client).to_string();
    assert!(text.contains("client.pem does not exist") && text.contains("gms keys"), "{text}");
    assert!(matches!(load(&dir.0.join("none"), Role::Node), Err(KeysError::Missing { .. })));
}

#[test]
fn an_expired_certificate_is_refused_at_once() {
    let dir = Dir::with_keys();
    let authority = Authority::load(&dir.0).unwrap();
    let now = SystemTime::now();
    let over = [now - 3 * CLOCK_SKEW, now - CLOCK_SKEW];
    let target = dir.0.join("old");
    let issued = authority.issue(Role::Node, [7; 16], over).unwrap();
    write(&authority, &target, Role::Node, &issued);
    assert!(matches!(load(&target, Role::Node), Err(KeysError::Expired { .. })));
    // It can be renewed.
    assert_eq!(list(&dir.0).unwrap().certificates[2].state, State::Expired);
    assert!(renew(&dir.0, Some("old")).unwrap()[0].kept_id);
    assert_eq!(load(&target, Role::Node).unwrap().id(), PeerId::Issued([7; 16]));
}

#[test]
fn each_key_has_an_id_of_its_own_which_a_renewed_one_keeps() {
    let dir = Dir::with_keys();
    issue(&dir.0, Role::Node, "n").unwrap();
    let target = issue(&dir.0, Role::Client, "n").unwrap();
    let mut ids = Vec::new();
    for (dir, role) in [
        (&dir.0, Role::Node),
        (&dir.0, Role::Client),
        (&target, Role::Node),
        (&target, Role::Client),
    ] {
        let id = load(dir, role).unwrap().id();
        assert!(matches!(id, PeerId::Issued(_)) && !ids.contains(&id), "{id}");
        ids.push(id);
    }
    let (key, before) = (target.join("client-key.pem"), load(&target, Role::Client).unwrap());
    let old_key = fs::read(&key).unwrap();
    let renewed = renew(&dir.0, Some("n")).unwrap();
    assert_eq!(renewed.iter().map(|renewed| renewed.role).collect::<Vec<_>>(), Role::BOTH);
    assert!(renewed.iter().all(|renewed| renewed.kept_id));
    let after = load(&target, Role::Client).unwrap();
    assert_eq!((after.id(), renewed[1].id), (before.id(), before.id()));
    assert_eq!(renewed[1].before, before.fingerprint());
    assert!(after.fingerprint() != before.fingerprint() && fs::read(&key).unwrap() != old_key);
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(load(&target, Role::Node).unwrap().id(), ids[2]);
    // Those of init have no name.
    assert_eq!(renew(&dir.0, None).unwrap().iter().map(|r| r.id).collect::<Vec<_>>(), ids[..2]);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 5, "nothing is left beside them");
}

#[test]
fn what_was_not_issued_here_is_not_renewed() {
    let (dir, other) = (Dir::with_keys(), Dir::with_keys());
    assert!(matches!(renew(&dir.0, Some("nobody")), Err(KeysError::NoBearer { .. })));
    assert!(matches!(renew(&dir.0, Some("../x")), Err(KeysError::Name(_))));
    let foreign = issue(&other.0, Role::Client, "x").unwrap();
    fs::rename(foreign, dir.0.join("x")).unwrap();
    let before = fs::read(dir.0.join("x/client.pem")).unwrap();
    assert!(matches!(renew(&dir.0, Some("x")), Err(KeysError::WrongCa { .. })));
    assert_eq!(fs::read(dir.0.join("x/client.pem")).unwrap(), before);
    let target = issue(&dir.0, Role::Client, "y").unwrap();
    assert!(
        matches!(renew(&target, None), Err(KeysError::Missing { .. })),
        "without the authority"
    );
    let lock = files::Lock::of(&dir.0).unwrap();
    assert!(matches!(renew(&dir.0, Some("y")), Err(KeysError::InUse { .. })));
    assert!(matches!(revoke(&dir.0, "y"), Err(KeysError::InUse { .. })));
    drop(lock);
    renew(&dir.0, Some("y")).unwrap();
}

#[test]
fn a_key_without_an_id_is_known_by_its_certificate_and_gets_an_id_when_it_is_renewed() {
    let dir = Dir::with_keys();
    let target = issue_before_ids(&dir.0);
    for role in Role::BOTH {
        let identity = load(&target, role).unwrap();
        assert_eq!(identity.id(), PeerId::Certificate(identity.fingerprint()));
    }
    let client = load(&target, Role::Client).unwrap();
    revoke(&dir.0, "before").unwrap();
    fs::copy(dir.0.join(REVOKED), target.join(REVOKED)).unwrap();
    assert!(matches!(load(&target, Role::Client), Err(KeysError::Revoked { .. })));
    let renewed = renew(&dir.0, Some("before")).unwrap();
    assert!(renewed.iter().all(|renewed| !renewed.kept_id && renewed.id != client.id()));
    assert_eq!(load(&target, Role::Client).unwrap().id(), renewed[1].id);
}

#[test]
fn a_key_is_of_one_role_and_has_one_id() {
    let dir = Dir::with_keys();
    // A node may connect, but its key is none for a pager.
    for (from, to) in [("node", "client"), ("client", "node")] {
        let target = dir.0.join(format!("as-{to}"));
        fs::create_dir(&target).unwrap();
        fs::copy(dir.0.join(CA), target.join(CA)).unwrap();
        for end in [".pem", "-key.pem"] {
            let (from, to) = (format!("{from}{end}"), format!("{to}{end}"));
            fs::copy(dir.0.join(from), target.join(to)).unwrap();
        }
        let role = if to == "node" { Role::Node } else { Role::Client };
        let error = load(&target, role).unwrap_err();
        assert!(matches!(error, KeysError::WrongRole { .. }), "{error}");
    }
    let authority = Authority::load(&dir.0).unwrap();
    let name = |id| bearer::name(Role::Client, [id; 16]);
    for (n, names) in [vec![name(1), name(2)], vec!["x.client.gms".into()]].iter().enumerate() {
        let target = dir.0.join(format!("odd-{n}"));
        let usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let issued = authority.sign(params("gms", valid_for(LIFETIME)), usages, names).unwrap();
        write(&authority, &target, Role::Client, &issued);
        let error = load(&target, Role::Client).unwrap_err();
        assert!(matches!(error, KeysError::Invalid { .. }), "{error}");
    }
}

#[test]
fn a_list_is_read_line_by_line_and_nothing_in_it_is_left_out() {
    let dir = Dir::with_keys();
    let own = load(&dir.0, Role::Client).unwrap();
    let (id, fingerprint) = (own.id().to_string(), own.fingerprint().to_string());
    let other = "0123456789abcdef0123456789abcdef";
    let names_us = [
        id.clone(),
        format!("# who left\n\n  {id}\t# client desk1\r\n{other}\n"),
        id.to_uppercase(),
        format!("{other}\n{other}\n{fingerprint}"),
    ];
    for text in names_us {
        set_list(&dir.0, &text);
        let error = load(&dir.0, Role::Client).unwrap_err();
        assert!(matches!(error, KeysError::Revoked { .. }), "{text}: {error}");
        assert!(error.to_string().contains("client.pem was revoked"), "{error}");
        load(&dir.0, Role::Node).unwrap();
    }
    for (text, count) in [(&b""[..], 0), (b"\n # \n#\xff\n", 0), (other.as_bytes(), 1)] {
        set_list(&dir.0, text);
        assert_eq!(load(&dir.0, Role::Client).unwrap().revoked(), count, "{text:?}");
    }
    let long = "\n".repeat(LIST_MAX as usize);
    set_list(&dir.0, &long);
    load(&dir.0, Role::Client).unwrap();
    set_list(&dir.0, format!("{long}{id}"));
    assert!(matches!(load(&dir.0, Role::Client), Err(KeysError::TooLong { .. })));
}

#[test]
fn a_list_that_is_damaged_is_an_error_with_its_line() {
    let dir = Dir::with_keys();
    let good = "0123456789abcdef0123456789abcdef";
    let bad: [&[u8]; 7] = [
        b"desk1",
        &good.as_bytes()[1..],
        b"0123456789abcdef0123456789abcdef 0123456789abcdef0123456789abcdef",
        b"id 0123456789abcdef0123456789abcdef",
        b"\xff\xfe",
        b"0123456789abcdef0123456789abcdeg",
        b"0123456789abcdef0123456789abcdef\0",
    ];
    for line in bad {
        set_list(&dir.0, [good.as_bytes(), b"\n# x\n", line, b"\n"].concat());
        for error in [load(&dir.0, Role::Node).unwrap_err(), revoke(&dir.0, good).unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("revoked.txt, line 3: an id"), "{text}");
        }
    }
    fs::remove_file(dir.0.join(REVOKED)).unwrap();
    fs::create_dir(dir.0.join(REVOKED)).unwrap();
    assert!(matches!(load(&dir.0, Role::Node), Err(KeysError::Unreadable { .. })));
}

#[test]
fn a_list_that_was_there_and_is_gone_or_damaged_does_not_take_effect() {
    let dir = Dir::with_keys();
    let node = load(&dir.0, Role::Node).unwrap();
    let node = node.reload(&dir.0).unwrap();
    set_list(&dir.0, "# nobody yet\n");
    let node = node.reload(&dir.0).unwrap();
    fs::remove_file(dir.0.join(REVOKED)).unwrap();
    let text = node.reload(&dir.0).unwrap_err().to_string();
    assert!(text.contains("revoked.txt is gone or empty: bring it back"), "{text}");
    set_list(&dir.0, "x");
    assert!(matches!(node.reload(&dir.0), Err(KeysError::BadLine { .. })));
    // What else the list says is to count, though we are on it.
    set_list(&dir.0, format!("{}\n{}\n", node.id(), "ab".repeat(16)));
    let node = node.reload(&dir.0).unwrap();
    assert!(node.is_revoked() && node.revoked() == 2);
}

#[test]
fn revoking_adds_to_the_list_by_name_id_or_fingerprint() {
    let dir = Dir::with_keys();
    for role in Role::BOTH {
        issue(&dir.0, role, "desk1").unwrap();
    }
    let ids = Role::BOTH.map(|role| load(&dir.0.join("desk1"), role).unwrap().id());
    set_list(&dir.0, "# by hand, without a line's end");
    let done = revoke(&dir.0, "desk1").unwrap();
    assert_eq!((done.list, done.added), (dir.0.join(REVOKED), ids.to_vec()));
    let text = fs::read_to_string(dir.0.join(REVOKED)).unwrap();
    let [node, client] = ids;
    let expected =
        format!("# by hand, without a line's end\n{node} # node desk1\n{client} # client desk1\n");
    let (seal, lines) = text.split_once('\n').unwrap();
    assert_eq!(lines, expected);
    assert_eq!(
        seal,
        format!("# SHA-256 of all lines below: {}", bearer::fingerprint(lines.as_bytes()))
    );
    assert_eq!(revoke(&dir.0, "desk1").unwrap().added, []);
    let own = load(&dir.0, Role::Client).unwrap();
    let fingerprint = PeerId::Certificate(own.fingerprint());
    assert_eq!(revoke(&dir.0, &fingerprint.to_string()).unwrap().added, [fingerprint]);
    assert_eq!(revoke(&dir.0, &own.id().to_string().to_uppercase()).unwrap().added, [own.id()]);
    let text = fs::read_to_string(dir.0.join(REVOKED)).unwrap();
    assert!(text.split_once('\n').unwrap().1.starts_with(&expected));
    assert!(matches!(revoke(&dir.0, "desk2"), Err(KeysError::Unknown { .. })));
    assert!(matches!(revoke(&dir.0, "../desk1"), Err(KeysError::Name(_))));
    assert!(matches!(revoke(&dir.0.join("none"), "desk1"), Err(KeysError::Missing { .. })));
    // Revoked with its id, it is not to have another key; with its certificate only, it is.
    assert!(matches!(renew(&dir.0, Some("desk1")), Err(KeysError::Revoked { .. })));
    issue(&dir.0, Role::Client, "desk3").unwrap();
    let desk3 = load(&dir.0.join("desk3"), Role::Client).unwrap();
    revoke(&dir.0, &desk3.fingerprint().to_string()).unwrap();
    assert_eq!(renew(&dir.0, Some("desk3")).unwrap()[0].id, desk3.id());
    assert_eq!(
        fs::read_dir(&dir.0)
            .unwrap()
            .filter(|entry| {
                entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "new")
            })
            .count(),
        0
    );
}

#[test]
fn the_listing_tells_who_holds_what() {
    let dir = Dir::with_keys();
    issue(&dir.0, Role::Client, "b").unwrap();
    issue(&dir.0, Role::Node, "a").unwrap();
    issue_for(&dir.0, Role::Node, "c", NOTICE / 2).unwrap();
    fs::create_dir(dir.0.join("other")).unwrap();
    revoke(&dir.0, "b").unwrap();
    fs::create_dir(dir.0.join("bad")).unwrap();
    fs::write(dir.0.join("bad/node.pem"), "no certificate").unwrap();
    let Listing { certificates: listed, faults } = list(&dir.0).unwrap();
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert!(faults[0].to_string().contains("bad/node.pem holds no valid PEM"), "{faults:?}");
    let told: Vec<_> =
        listed.iter().map(|listed| (listed.name.as_deref(), listed.role, listed.state)).collect();
    use {Role::*, State::*};
    assert_eq!(
        told,
        [
            (None, Node, Good),
            (None, Client, Good),
            (Some("a"), Node, Good),
            (Some("b"), Client, Revoked),
            (Some("c"), Node, Ending),
        ]
    );
    let client = load(&dir.0, Role::Client).unwrap();
    assert_eq!((listed[1].id, listed[1].fingerprint), (client.id(), client.fingerprint()));
    let year = 1970
        + client.expires().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 31_556_952;
    assert!(listed[1].expires.len() == 10, "{}", listed[1].expires);
    let told: u64 = listed[1].expires[..4].parse().unwrap();
    assert!(told.abs_diff(year) <= 1, "{told} {year}");
}

#[test]
fn revoking_a_name_revokes_the_certificates_from_before_ids_too() {
    let dir = Dir::with_keys();
    let target = issue_before_ids(&dir.0);
    let before = Role::BOTH.map(|role| load(&target, role).unwrap());
    // Whoever copied the keys before they were renewed still has them.
    let copy = dir.0.join("copy");
    fs::create_dir(&copy).unwrap();
    for file in ["ca.pem", "node.pem", "node-key.pem", "client.pem", "client-key.pem"] {
        fs::copy(target.join(file), copy.join(file)).unwrap();
    }
    // A renewal was killed before it was over.
    fs::copy(target.join("node.pem"), target.join("node-before.pem")).unwrap();
    assert_eq!(list(&dir.0).unwrap().certificates.len(), 2 + 2 + 2);
    for _ in 0..2 {
        renew(&dir.0, Some("before")).unwrap();
    }
    let after = Role::BOTH.map(|role| load(&target, role).unwrap().id());
    let added = revoke(&dir.0, "before").unwrap().added;
    assert_eq!(added, [after[0], before[0].id(), after[1], before[1].id()]);
    for (dir, role) in [(&copy, Role::Node), (&copy, Role::Client), (&target, Role::Client)] {
        let list = dir.join(REVOKED);
        fs::copy(dir.parent().unwrap().join(REVOKED), list).unwrap();
        assert!(matches!(load(dir, role), Err(KeysError::Revoked { .. })), "{dir:?} {role:?}");
    }
}

#[test]
fn a_part_of_a_list_is_not_taken_for_the_list() {
    let dir = Dir::with_keys();
    issue(&dir.0, Role::Client, "desk1").unwrap();
    set_list(&dir.0, "# by hand\n");
    revoke(&dir.0, "desk1").unwrap();
    revoke(&dir.0, &"ab".repeat(32)).unwrap();
    let node = load(&dir.0, Role::Node).unwrap();
    assert_eq!(node.revoked(), 2);
    let whole = fs::read(dir.0.join(REVOKED)).unwrap();
    for len in 0..whole.len() {
        set_list(&dir.0, &whole[..len]);
        let text = node.reload(&dir.0).unwrap_err().to_string();
        let expected =
            if len == 0 { "revoked.txt is gone or empty" } else { "revoked.txt is not whole" };
        assert!(text.contains(expected), "{len}: {text}");
        assert!(len == 0 || revoke(&dir.0, &"cd".repeat(16)).is_err(), "{len}");
    }
    set_list(&dir.0, [&whole[..], b"# more"].concat());
    assert!(node.reload(&dir.0).is_err());
    set_list(&dir.0, &whole);
    assert_eq!(node.reload(&dir.0).unwrap().revoked(), 2);
    // Without its first line it is one by hand.
    let first = whole.iter().position(|byte| *byte == b'\n').unwrap();
    set_list(&dir.0, &whole[first + 1..]);
    assert_eq!(node.reload(&dir.0).unwrap().revoked(), 2);
}

#[test]
fn a_name_that_reads_as_an_id_is_revoked_where_there_is_one() {
    let dir = Dir::with_keys();
    for name in ["AB".repeat(16), "ab".repeat(32)] {
        assert!(matches!(issue(&dir.0, Role::Client, &name), Err(KeysError::Name(_))), "{name}");
        // As it could be issued before there were ids.
        let target = issue(&dir.0, Role::Client, "x").unwrap();
        fs::rename(target, dir.0.join(&name)).unwrap();
        let own = load(&dir.0.join(&name), Role::Client).unwrap();
        assert_eq!(renew(&dir.0, Some(&name)).unwrap()[0].id, own.id());
        assert_eq!(revoke(&dir.0, &name).unwrap().added, [own.id()]);
    }
    let other = "cd".repeat(16);
    assert_eq!(revoke(&dir.0, &other).unwrap().added, [other.parse().unwrap()]);
}

#[test]
fn the_files_of_an_authority_cannot_be_the_names_of_keys() {
    let dir = Dir::with_keys();
    issue(&dir.0, Role::Client, "x").unwrap();
    for name in ["node.pem", "client-key.pem", "client-before.pem"] {
        fs::remove_file(dir.0.join(name)).ok();
        assert!(matches!(issue(&dir.0, Role::Node, name), Err(KeysError::Name(_))), "{name}");
    }
    // Neither are those which commands make for a moment.
    for name in ["revoked.new", "node.new", "revoked.txt.new"] {
        issue(&dir.0, Role::Node, name).unwrap();
    }
    revoke(&dir.0, "x").unwrap();
}

#[test]
fn nobody_who_may_only_read_a_directory_keeps_others_from_changing_it() {
    let dir = Dir::with_keys();
    let file = fs::File::open(&dir.0).unwrap();
    let _lock = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).unwrap();
    renew(&dir.0, None).unwrap();
    let own = files::Lock::of(&dir.0).unwrap();
    assert!(matches!(renew(&dir.0, None), Err(KeysError::InUse { .. })));
    drop(own);
    let mode = fs::metadata(dir.0.join(".lock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_link_is_not_replaced_by_a_file() {
    let (dir, shared) = (Dir::with_keys(), Dir::with_keys());
    let list = shared.0.join("list");
    fs::write(&list, "# nobody\n").unwrap();
    std::os::unix::fs::symlink(&list, dir.0.join(REVOKED)).unwrap();
    let error = revoke(&dir.0, &"ab".repeat(16)).unwrap_err();
    assert!(error.to_string().contains("revoked.txt is a symbolic link"), "{error}");
    assert!(dir.0.join(REVOKED).is_symlink());
    assert_eq!(fs::read_to_string(&list).unwrap(), "# nobody\n");
}

#[test]
fn keys_of_both_roles_are_renewed_or_none() {
    let dir = Dir::with_keys();
    let key = dir.0.join("client-key.pem");
    fs::remove_file(&key).unwrap();
    fs::create_dir(&key).unwrap();
    let before = load(&dir.0, Role::Node).unwrap();
    renew(&dir.0, None).unwrap_err();
    assert_eq!(load(&dir.0, Role::Node).unwrap().fingerprint(), before.fingerprint());
}

#[test]
fn what_is_no_file_is_refused_and_not_waited_for() {
    let dir = Dir::with_keys();
    let node = load(&dir.0, Role::Node).unwrap();
    for file in ["node-key.pem", "node.pem", "ca.pem", REVOKED] {
        let path = dir.0.join(file);
        let before = fs::read(&path).ok();
        fs::remove_file(&path).ok();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let (node, of) = (node.clone(), dir.0.clone());
        std::thread::spawn(move || tell.send(node.reload(&of)).ok());
        let error = told.recv_timeout(Duration::from_secs(20)).expect("no wait").unwrap_err();
        assert!(error.to_string().contains(&format!("{file}: it is no regular file")), "{error}");
        fs::remove_file(&path).unwrap();
        before.into_iter().for_each(|bytes| fs::write(&path, bytes).unwrap());
        fs::set_permissions(dir.0.join("node-key.pem"), fs::Permissions::from_mode(0o600)).unwrap();
    }
}
