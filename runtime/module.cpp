#include "runtime/module.hpp"

#include <elf.h>

#include <cstddef>
#include <cstring>

#include "tilewave/tile/module.tile.hpp"

namespace tw {
namespace {

/// A copy of the T at `offset`, or nothing if it is not inside `bytes`.
template <class T>
std::optional<T> read_at(std::string_view bytes, std::uint64_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return {};
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::optional<std::string_view> part(std::string_view bytes, std::uint64_t offset, std::uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) return {};
  return bytes.substr(offset, size);
}

/// The initial bytes of the object `name` in the ELF file's symbol table.
std::optional<std::string_view> find_object(std::string_view file, std::string_view name) {
  const auto header = read_at<Elf64_Ehdr>(file, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64) return {};
  const auto section = [&](std::uint64_t index) {
    return index < header->e_shnum ? read_at<Elf64_Shdr>(file, header->e_shoff + index * sizeof(Elf64_Shdr)) : std::nullopt;
  };
  for (unsigned i = 0; i < header->e_shnum; ++i) {
    const auto symbols = section(i);
    if (!symbols) return {};
    if (symbols->sh_type != SHT_SYMTAB) continue;
    const auto strings = section(symbols->sh_link);
    const auto names = strings ? part(file, strings->sh_offset, strings->sh_size) : std::nullopt;
    if (!names) return {};
    for (std::uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols->sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = read_at<Elf64_Sym>(file, symbols->sh_offset + at);
      if (!symbol || symbol->st_name >= names->size()) return {};
      const std::string_view found = names->substr(symbol->st_name);
      if (found.substr(0, found.find('\0')) != name) continue;
      const auto holder = section(symbol->st_shndx);
      if (!holder || holder->sh_type == SHT_NOBITS) return {};
      const auto bytes = part(file, holder->sh_offset, holder->sh_size);
      return bytes ? part(*bytes, symbol->st_value, symbol->st_size) : std::nullopt;
    }
  }
  return {};
}

}  // namespace

std::optional<ModuleInfo> read_module(std::string_view cubin) {
  const auto object = find_object(cubin, kModuleSymbol);
  const auto header = object ? read_at<ModuleHeader>(*object, 0) : std::nullopt;
  if (!header || header->magic != ModuleHeader::kMagic || header->params_offset < 0 || header->params_bytes < 0) return {};
  const auto params = part(*object, static_cast<std::uint64_t>(header->params_offset), static_cast<std::uint64_t>(header->params_bytes));
  if (!params) return {};
  ModuleInfo info;
  info.threads = header->threads;
  info.shared_bytes = header->shared_bytes;
  info.cluster = header->cluster;
  info.min_blocks = header->min_blocks;
  info.persistent = header->persistent != 0;
  info.loads = header->loads != 0;
  info.waits = header->waits != 0;
  info.params = *params;
  return info;
}

}  // namespace tw
