//! The programs: loaded once, and attached while they work.

use aya::maps::MapError;
use aya::programs::tp_btf::BtfTracePointLinkId;
use aya::programs::{BtfTracePoint, ProgramError};
use aya::{Btf, Ebpf, EbpfLoader};

use crate::ObserverError;
use crate::layout::Setting;
use crate::observer::bpf;

/// Built by `build-programs`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/programs.o"));

/// The programs of one observer. They are detached when this value is dropped.
pub(crate) struct Programs {
    loaded: Ebpf,
    /// The programs whose hooks the kernel has.
    ready: Vec<&'static str>,
    attached: Vec<(&'static str, BtfTracePointLinkId)>,
}

impl Programs {
    pub fn load(btf: &Btf, setting: &Setting) -> Result<Self, ObserverError> {
        let loaded = EbpfLoader::new()
            .btf(Some(btf))
            .override_global("SETTING", setting, true)
            .load(OBJECT)
            .map_err(|e| bpf("load", e))?;
        Ok(Self { loaded, ready: Vec::new(), attached: Vec::new() })
    }

    /// Attaches one program to the hook of that name, for the first time.
    pub fn begin(&mut self, btf: &Btf, program: &'static str, hook: &str) -> Result<(), ObserverError> {
        self.program(program)?.load(hook, btf).map_err(|e| bpf(program, e))?;
        self.attach(program)?;
        self.ready.push(program);
        Ok(())
    }

    /// Tries whether this process can attach a detached program again, with the program whose loss matters least.
    /// Also returns that program.
    pub fn try_again(&mut self) -> (Option<&'static str>, Result<(), ObserverError>) {
        let Some((program, link)) = self.attached.pop() else { return (None, Ok(())) };
        let detached = self.program(program).and_then(|found| found.detach(link).map_err(|e| bpf(program, e)));
        (Some(program), detached.and_then(|()| self.attach(program)))
    }

    /// Attaches all programs that were begun: all or none.
    pub fn attach_all(&mut self) -> Result<(), ObserverError> {
        for program in self.ready.clone() {
            if self.attached.iter().any(|(attached, _)| *attached == program) {
                continue;
            }
            if let Err(error) = self.attach(program) {
                self.detach_all();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Detaches all programs. Later touches are not reported.
    pub fn detach_all(&mut self) {
        for (program, link) in std::mem::take(&mut self.attached) {
            // Fails only if there is no such link.
            let _ = self.program(program).map(|found| found.detach(link));
        }
    }

    pub fn take_map(&mut self, name: &str) -> Result<aya::maps::Map, ObserverError> {
        self.loaded.take_map(name).ok_or_else(|| ObserverError::Kernel(format!("no map {name}")))
    }

    pub fn take<M: TryFrom<aya::maps::Map, Error = MapError>>(&mut self, name: &str) -> Result<M, ObserverError> {
        M::try_from(self.take_map(name)?).map_err(|e| bpf(name, e))
    }

    fn attach(&mut self, program: &'static str) -> Result<(), ObserverError> {
        let link = self.program(program)?.attach().map_err(|e| bpf(program, e))?;
        self.attached.push((program, link));
        Ok(())
    }

    fn program(&mut self, name: &str) -> Result<&mut BtfTracePoint, ObserverError> {
        let found = self.loaded.program_mut(name).ok_or_else(|| ObserverError::Kernel(format!("no program {name}")))?;
        found.try_into().map_err(|e: ProgramError| bpf(name, e))
    }
}
