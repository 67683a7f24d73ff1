// The footer of a file of the table, verified before it is parsed.
//
// Local invariants
//   H1  The CRC-32C of the footer, its length and the magic behind it is that of the file's name; Python
//       put it into the plan.  Nothing of an unverified footer is used: a flipped bit in it could hide
//       rows.
//   H2  The footer states the rows and offsets that the table's log states.
package pk.reader;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.zip.CRC32C;
import org.apache.hadoop.conf.Configuration;
import org.apache.parquet.HadoopReadOptions;
import org.apache.parquet.column.statistics.Statistics;
import org.apache.parquet.format.converter.ParquetMetadataConverter;
import org.apache.parquet.hadoop.metadata.BlockMetaData;
import org.apache.parquet.hadoop.metadata.ColumnChunkMetaData;
import org.apache.parquet.hadoop.metadata.ParquetMetadata;

/** Which bytes of a file to read, and how large its rows are. */
final class Footer {
  private static final int TRAILER_BYTES = 8;
  private static final int MAGIC = 0x31524150; // "PAR1", little endian
  private static final int FOOTER_BYTES_MOST = 64 << 20;

  /** The part of the file that holds the row groups of the range; empty if none has a row of it. */
  final long start;
  final long size;
  /** The decoded bytes of a row, on average. */
  final long rowBytes;

  private Footer(long start, long size, long rowBytes) {
    this.start = start;
    this.size = size;
    this.rowBytes = rowBytes;
  }

  /** One file of the plan. */
  static final class Planned {
    final Path path;
    final long minOffset;
    final long maxOffset;
    final long size;
    final long rows;
    final long crc;

    Planned(Path path, long minOffset, long maxOffset, long size, long rows, long crc) {
      this.path = path;
      this.minOffset = minOffset;
      this.maxOffset = maxOffset;
      this.size = size;
      this.rows = rows;
      this.crc = crc;
    }
  }

  /** Verifies a file's footer and finds the row groups with offsets in `[from, to)`. */
  static Footer read(Planned file, long from, long to) throws IOException {
    ParquetMetadata found = parse(file, verified(file));
    long rows = 0;
    long bytes = 0;
    long first = -1;
    long last = -1;
    for (BlockMetaData group : found.getBlocks()) {
      rows += group.getRowCount();
      bytes += group.getTotalByteSize();
      long[] bounds = bounds(group, file);
      if (bounds[0] < to && bounds[1] >= from) {
        first = first < 0 ? group.getStartingPos() : first;
        last = group.getStartingPos() + group.getCompressedSize();
      }
    }
    if (rows != file.rows) {
      throw new IOException(file.path + ": " + rows + " rows, the table says " + file.rows);
    }
    return new Footer(first, first < 0 ? 0 : last - first, bytes / Math.max(1, rows));
  }

  private static byte[] verified(Planned file) throws IOException {
    try (FileChannel channel = FileChannel.open(file.path, StandardOpenOption.READ)) {
      if (channel.size() != file.size || file.size < TRAILER_BYTES) {
        throw new IOException(file.path + ": " + channel.size() + " bytes, not " + file.size);
      }
      ByteBuffer trailer = bytes(channel, file.size - TRAILER_BYTES, TRAILER_BYTES);
      long length = trailer.getInt(0) & 0xffffffffL;
      if (trailer.getInt(4) != MAGIC
          || length > FOOTER_BYTES_MOST
          || length + TRAILER_BYTES > file.size) {
        throw new IOException(file.path + " does not end like a Parquet file");
      }
      int whole = (int) length + TRAILER_BYTES;
      byte[] footer = bytes(channel, file.size - whole, whole).array();
      CRC32C crc = new CRC32C();
      crc.update(footer, 0, footer.length);
      if (crc.getValue() != file.crc) {
        throw new IOException(file.path + ": the checksum of its footer does not match"); // H1
      }
      return footer;
    }
  }

  private static ByteBuffer bytes(FileChannel channel, long at, int size) throws IOException {
    ByteBuffer found = ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN);
    while (found.hasRemaining()) {
      if (channel.read(found, at + found.position()) < 0) {
        throw new IOException("the file ends too early");
      }
    }
    return found;
  }

  private static ParquetMetadata parse(Planned file, byte[] footer) throws IOException {
    int length = footer.length - TRAILER_BYTES;
    ParquetMetadata found =
        new ParquetMetadataConverter(HadoopReadOptions.builder(new Configuration(false)).build())
            .readParquetMetadata(
                new ByteArrayInputStream(footer, 0, length),
                ParquetMetadataConverter.NO_FILTER,
                null,
                false,
                length);
    long behind = 0;
    for (BlockMetaData group : found.getBlocks()) {
      if (group.getStartingPos() < behind) {
        throw new IOException(file.path + ": its row groups are not in order");
      }
      behind = group.getStartingPos() + group.getCompressedSize();
    }
    if (behind > file.size) {
      throw new IOException(file.path + ": its footer names bytes behind its end");
    }
    return found;
  }

  private static long[] bounds(BlockMetaData group, Planned file) throws IOException {
    for (ColumnChunkMetaData column : group.getColumns()) {
      if (column.getPath().toDotString().equals("offset")) {
        Statistics<?> found = column.getStatistics();
        if (found == null || !found.hasNonNullValue()) {
          return new long[] {file.minOffset, file.maxOffset};
        }
        long low = ((Number) found.genericGetMin()).longValue();
        long high = ((Number) found.genericGetMax()).longValue();
        if (low < file.minOffset || high > file.maxOffset) {
          throw new IOException(file.path + ": offsets beyond those of the table's log"); // H2
        }
        return new long[] {low, high};
      }
    }
    throw new IOException(file.path + " has no column offset");
  }
}
