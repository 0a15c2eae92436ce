//! Workers in processes of their own: this test binary, started again.

use super::pools::{Controlled, Pools};
use super::{PAGES, PATIENCE, SOON, UNITS};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tiered_connector::lanes::Lanes;
use tiered_connector::remote::RemoteMover;
use tiered_connector::wire::Hello;
use tiered_connector::worker::{Served, Worker};

/// The directory of a worker's scene, and which shard it has.
const DIRECTORY: &str = "SHARDS_TEST_DIRECTORY";
const SHARD: &str = "SHARDS_TEST_SHARD";

/// Processes, and the movers that they joined.
pub(super) struct Workers {
    directory: PathBuf,
    shards: Vec<Shard>,
}

struct Shard {
    listener: UnixListener,
    process: Mutex<Child>,
    mover: RemoteMover,
    stream: Mutex<UnixStream>,
}

impl Workers {
    pub(super) fn none(directory: &Path) -> Workers {
        Workers { directory: directory.to_owned(), shards: Vec::new() }
    }

    /// Starts the next shard's.
    pub(super) fn start(&mut self, shard: usize) -> RemoteMover {
        let listener = UnixListener::bind(socket(&self.directory, shard)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let process = Mutex::new(spawn(&self.directory, shard));
        let accepted = accept(&listener, SOON);
        let stream = Mutex::new(accepted.try_clone().unwrap());
        let mover = RemoteMover::join(accepted, hello(&self.directory, shard), PATIENCE).unwrap();
        self.shards.push(Shard { listener, process, mover: mover.clone(), stream });
        mover
    }

    pub(super) fn kill(&self, shard: usize) {
        let mut process = self.shards[shard].process.lock();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    pub(super) fn restart(&self, shard: usize) {
        *self.shards[shard].process.lock() = spawn(&self.directory, shard);
        assert!(self.rejoin(shard));
    }

    pub(super) fn signal(&self, shard: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.shards[shard].process.lock()), signal).unwrap();
    }

    pub(super) fn disconnect(&self, shard: usize) {
        self.shards[shard].stream.lock().shutdown(Shutdown::Write).unwrap();
    }

    /// Takes the next connection of a worker; whether it joined.
    pub(super) fn rejoin(&self, shard: usize) -> bool {
        let Shard { listener, mover, stream, .. } = &self.shards[shard];
        let accepted = accept(listener, SOON);
        *stream.lock() = accepted.try_clone().unwrap();
        mover.rejoin(accepted).is_ok()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for shard in &self.shards {
            let mut process = shard.process.lock();
            _ = process.kill(); // it may have ended
            _ = process.wait();
        }
    }
}

fn socket(directory: &Path, shard: usize) -> PathBuf {
    directory.join(format!("shard-{shard}"))
}

fn hello(directory: &Path, shard: usize) -> Hello {
    let unit_bytes = Pools::open(directory).page_bytes(shard) as u64;
    Hello { shard: shard as u32, units: UNITS, unit_bytes, pages: PAGES }
}

fn spawn(directory: &Path, shard: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "worker_process", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(SHARD, shard.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn accept(listener: &UnixListener, timeout: Duration) -> UnixStream {
    let began = Instant::now();
    loop {
        if let Ok((stream, _)) = listener.accept() {
            return stream;
        }
        assert!(began.elapsed() < timeout, "no worker connects");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A worker's life: serves whoever listens, until it is told that this was all or nobody listens.
pub(crate) fn work() {
    let (Ok(directory), Ok(shard)) = (std::env::var(DIRECTORY), std::env::var(SHARD)) else { return };
    let (directory, shard) = (PathBuf::from(directory), shard.parse().unwrap());
    let engine = Controlled::new(&Pools::open(&directory), shard);
    let lanes = Lanes::start(2, Box::new(engine)).unwrap();
    let mut worker = Worker::new(hello(&directory, shard), lanes);
    while let Ok(stream) = UnixStream::connect(socket(&directory, shard)) {
        if matches!(worker.serve(stream), Ok(Served::ShutDown)) {
            break;
        }
    }
    worker.stop();
}
