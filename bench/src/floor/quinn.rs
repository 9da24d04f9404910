//! The same exchange by the `quinn` crate on its asynchronous runtime, which blocks when there is nothing to do: what gms would have
//! if it did not drive quinn-proto in loops of its own. Keys, cipher and packet sizes are those of gms-transport.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use gms_transport::keys::NODE_NAME;
use gms_transport::quic::limits::{INITIAL_WINDOW, MTU_LOOPBACK, MTU_MAX};
use quinn::congestion::CubicConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, MtuDiscoveryConfig, ServerConfig, TokioRuntime,
    TransportConfig,
};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::{Error, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use tokio::runtime::{Builder, Runtime};

use crate::cli::Protocol;
use crate::error::{BenchError, Trying};
use crate::network::Network;
use crate::peer::{Peer, REQUEST_LEN};
use crate::placement::{Pinned, Placement};
use crate::procfs::Meter;
use crate::samples::Samples;

/// Of the application protocol.
const NAME: &[u8] = b"gms-bench";
/// Bytes of the headers of IPv4 and UDP.
const IP_AND_UDP: u16 = 28;

/// `count` exchanges, and a tenth as many before them to warm up.
pub(crate) fn exchanges(
    network: &Network,
    placement: &Placement,
    keys: &Path,
    count: usize,
) -> Result<Samples, BenchError> {
    let peer = Peer::start(network, Protocol::Quinn, placement, Some(keys))?;
    let _pinned = Pinned::to(placement.cpus.map(|cpus| cpus.0))?;
    runtime()?.block_on(request(network, &peer, keys, count))
}

async fn request(
    network: &Network,
    peer: &Peer,
    keys: &Path,
    count: usize,
) -> Result<Samples, BenchError> {
    let endpoint = endpoint(network.near(), None)?;
    let connecting = endpoint.connect_with(client(network.mtu(), keys)?, peer.addr, NODE_NAME);
    let connection = connecting.map_err(failed)?.await.map_err(failed)?;
    let (request, mut reply) = ([3; REQUEST_LEN], vec![0; Protocol::Quinn.reply_len()]);
    let mut samples = Samples::new();
    let warm_up = count / 10;
    let mut meter = Meter::start(Some(peer.pid()))?;
    for number in 0..count + warm_up {
        if number == warm_up {
            meter = Meter::start(Some(peer.pid()))?;
        }
        let at = number % reply.len();
        reply[at] = 0;
        let start = Instant::now();
        let (mut send, mut receive) = connection.open_bi().await.map_err(failed)?;
        send.write_all(&request).await.map_err(failed)?;
        send.finish().map_err(failed)?;
        receive.read_exact(&mut reply).await.map_err(failed)?;
        let took = start.elapsed();
        if reply[at] != 7 {
            return Err(BenchError::WrongBytes(format!("reply {number}")));
        }
        if number >= warm_up {
            samples.add(took);
        }
    }
    samples.cpu_us = meter.us()? / count as f64;
    Ok(samples)
}

/// Replies to every request, until it is killed.
pub(crate) fn serve(bind: Ipv4Addr, mtu: Option<u16>, keys: &Path) -> Result<(), BenchError> {
    runtime()?.block_on(async {
        let endpoint = endpoint(bind, Some(server(mtu, keys)?))?;
        println!("{}", endpoint.local_addr().trying("no local address")?);
        let incoming = endpoint.accept().await.ok_or_else(|| failed("no requester"))?;
        let connection = incoming.await.map_err(failed)?;
        let (mut request, reply) = ([0; REQUEST_LEN], vec![7; Protocol::Quinn.reply_len()]);
        loop {
            let (mut send, mut receive) = connection.accept_bi().await.map_err(failed)?;
            receive.read_exact(&mut request).await.map_err(failed)?;
            send.write_all(&reply).await.map_err(failed)?;
            send.finish().map_err(failed)?;
        }
    })
}

/// One thread, as both ends of gms have for it.
fn runtime() -> Result<Runtime, BenchError> {
    Builder::new_current_thread().enable_all().build().trying("no runtime")
}

fn endpoint(bind: Ipv4Addr, server: Option<ServerConfig>) -> Result<Endpoint, BenchError> {
    let socket = std::net::UdpSocket::bind((bind, 0));
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(MTU_MAX).map_err(failed)?;
    let socket = socket.trying("cannot bind a UDP socket")?;
    Endpoint::new(config, server, socket, Arc::new(TokioRuntime)).trying("no endpoint")
}

/// `mtu`: of the path, if it is not loopback.
fn transport(mtu: Option<u16>) -> Arc<TransportConfig> {
    // Its usual window is smaller than one such packet: nothing would ever be sent.
    let mut cubic = CubicConfig::default();
    cubic.initial_window(INITIAL_WINDOW);
    let mut config = TransportConfig::default();
    config.congestion_controller_factory(Arc::new(cubic));
    match mtu {
        None => config.initial_mtu(MTU_LOOPBACK).mtu_discovery_config(None),
        Some(mtu) => {
            let mut discovery = MtuDiscoveryConfig::default();
            discovery.upper_bound(mtu - IP_AND_UDP);
            config.mtu_discovery_config(Some(discovery))
        }
    };
    Arc::new(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..aws_lc_rs::default_provider()
    })
}

/// The authority, a certificate and its key: those of `role` in the folder.
type Proof = (Arc<RootCertStore>, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn load(keys: &Path, role: &str) -> Result<Proof, BenchError> {
    let certificate = |name: &str| CertificateDer::from_pem_file(keys.join(format!("{name}.pem")));
    let load = || -> Result<_, Error> {
        let key = PrivateKeyDer::from_pem_file(keys.join(format!("{role}-key.pem")))?;
        Ok((certificate("ca")?, certificate(role)?, key))
    };
    let (authority, own, key) = load().map_err(failed)?;
    let mut roots = RootCertStore::empty();
    roots.add(authority).map_err(failed)?;
    Ok((Arc::new(roots), vec![own], key))
}

fn client(mtu: Option<u16>, keys: &Path) -> Result<ClientConfig, BenchError> {
    let (roots, certificate, key) = load(keys, "client")?;
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
    let mut tls = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .with_webpki_verifier(verifier.map_err(failed)?)
        .with_client_auth_cert(certificate, key)
        .map_err(failed)?;
    tls.alpn_protocols = vec![NAME.to_vec()];
    let tls: QuicClientConfig = tls.try_into().map_err(failed)?;
    let mut config = ClientConfig::new(Arc::new(tls));
    config.transport_config(transport(mtu));
    Ok(config)
}

fn server(mtu: Option<u16>, keys: &Path) -> Result<ServerConfig, BenchError> {
    let (roots, certificate, key) = load(keys, "node")?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .with_client_cert_verifier(verifier.map_err(failed)?)
        .with_single_cert(certificate, key)
        .map_err(failed)?;
    tls.alpn_protocols = vec![NAME.to_vec()];
    let tls: QuicServerConfig = tls.try_into().map_err(failed)?;
    let mut config = ServerConfig::with_crypto(Arc::new(tls));
    config.transport_config(transport(mtu));
    Ok(config)
}

fn failed(error: impl ToString) -> BenchError {
    let problem = format!("failed: {}", error.to_string());
    BenchError::Program { program: "quinn".into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::quic::make_keys;
    use crate::scratch::Scratch;

    #[test]
    fn a_requester_is_proved_to_the_peer_and_the_peer_to_it() {
        let (keys, others) = (Scratch::new().expect("a folder"), Scratch::new().expect("a folder"));
        make_keys(keys.as_ref()).expect("keys");
        make_keys(others.as_ref()).expect("keys");
        let run = |client_of: &Scratch| {
            let runtime = runtime().expect("a runtime");
            runtime.block_on(async {
                let server = server(None, keys.as_ref()).expect("a configuration");
                let server = endpoint(Ipv4Addr::LOCALHOST, Some(server)).expect("an endpoint");
                let client = client(None, client_of.as_ref()).expect("a configuration");
                let addr = server.local_addr().expect("an address");
                let endpoint = endpoint(Ipv4Addr::LOCALHOST, None).expect("an endpoint");
                let connecting = endpoint.connect_with(client, addr, NODE_NAME).expect("one");
                let accepted = async { server.accept().await.expect("one").await.is_ok() };
                let (connected, accepted) = tokio::join!(connecting, accepted);
                connected.is_ok() && accepted
            })
        };
        assert!(run(&keys));
        assert!(!run(&others));
    }
}
